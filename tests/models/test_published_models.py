"""Published models: their configurations are understood, from loading to planning, without weights."""

import math
import re

import pytest
from published_configs import PUBLISHED, REFUSED
from variants import CONFIGS, VARIANTS, golden_checkpoint

from jaxllm.engine.costs import shape_of
from jaxllm.errors import UnsupportedModelError
from jaxllm.models.config import config_from_dict, read_hf_config
from jaxllm.models.registry import abstract_params, weight_bytes


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_many_as_published(name):
    values, published = PUBLISHED[name]
    config = config_from_dict(values)
    params = abstract_params(config, "bfloat16")
    assert config.architecture == values["architectures"][0]
    assert sum(math.prod(struct.shape) for struct in params.values()) == pytest.approx(published, rel=0.002)
    # What costs are predicted from leaves biases and norms out.
    shape = shape_of(config, name, "bfloat16")
    assert shape.num_parameters == pytest.approx(published, rel=0.002)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_implemented_is_refused_by_name(name):
    values, named = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=re.escape(named)):
        config_from_dict(values)


# Projections of embeddings are left out.
PROJECTED = {
    name
    for name, values in CONFIGS.items()
    if values.get("word_embed_proj_dim", values["hidden_size"]) != values["hidden_size"]
}


@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in PROJECTED])
def test_shapes_for_costs_count_the_matrices(name):
    config = config_from_dict(read_hf_config(golden_checkpoint(name)))
    params = abstract_params(config, "float32")
    matrices = sum(
        math.prod(struct.shape)
        for name, struct in params.items()
        if len(struct.shape) == 2 and name != "embed_positions.weight"
    )
    assert shape_of(config, name, "float32").num_parameters == matrices
    assert weight_bytes(config, "float32") >= 4 * matrices
