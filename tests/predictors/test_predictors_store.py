"""Profiles on disk: round trips, names, and every way a file can be wrong."""

import dataclasses
import hashlib
import io
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.errors import ConfigError, JaxllmError, ProfileError
from jaxllm.predictors.devices import device_spec
from jaxllm.predictors.published_shapes import model_shape
from jaxllm.predictors.roofline import RooflineCostModel
from jaxllm.predictors.store import Profile, profile_path
from jaxllm.predictors.table import TableAxes, TableCostModel

LLAMA = model_shape("llama-13b", "bfloat16")
AXES = TableAxes.geometric(
    max_num_batched_tokens=64, max_num_seqs=8, max_context_tokens=512, max_num_blocks=16
)
PROFILE = Profile(
    device="NVIDIA H100 80GB HBM3",
    model=LLAMA,
    block_size=16,
    versions={"jax": "0.10.2", "jaxllm": "0.1.0"},
    num_samples={"prefill": 500, "decode": 400},
    errors={"prefill": {"test": {"mape": 0.012}}},
    table=TableCostModel.distil(RooflineCostModel(LLAMA, device_spec("H100-SXM")), AXES),
)


def edited(path, edit):
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document))
    return path


def with_arrays(path, **changes):
    """The profile with other arrays, and a checksum that matches them."""
    arrays = PROFILE.table.to_arrays() | changes
    arrays = {name: array for name, array in arrays.items() if array is not None}
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    path.with_suffix(".npz").write_bytes(buffer.getvalue())
    digest = hashlib.sha256(buffer.getvalue()).hexdigest()
    shapes = {name: list(array.shape) for name, array in arrays.items()}
    description = {"num_bytes": len(buffer.getvalue()), "sha256": digest, "shapes": shapes}
    return edited(path, lambda document: document.update(arrays=description))


def test_a_profile_comes_back_as_it_was(tmp_path):
    path = PROFILE.save(tmp_path / "new folder")
    loaded = Profile.load(path)
    for field in dataclasses.fields(Profile):
        if field.name != "table":
            assert getattr(loaded, field.name) == getattr(PROFILE, field.name)
    assert loaded.table.axes == AXES
    for name, array in PROFILE.table.to_arrays().items():
        assert np.array_equal(loaded.table.to_arrays()[name], array)
    work = (5, 300, 40, 2)
    assert loaded.table.step_seconds(*work) == PROFILE.table.step_seconds(*work) > 0
    loaded.check_matches(device="NVIDIA H100 80GB HBM3", model=LLAMA, block_size=16)


def test_saving_again_replaces_and_leaves_nothing_else(tmp_path):
    path = PROFILE.save(tmp_path)
    assert dataclasses.replace(PROFILE, num_samples={"prefill": 1}).save(tmp_path) == path
    assert Profile.load(path).num_samples == {"prefill": 1}
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([path.name, path.with_suffix(".npz").name])


def test_a_failed_save_leaves_the_old_profile(tmp_path, monkeypatch):
    path = PROFILE.save(tmp_path)
    monkeypatch.setattr("os.replace", lambda *names: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        dataclasses.replace(PROFILE, num_samples={"prefill": 1}).save(tmp_path)
    monkeypatch.undo()
    assert Profile.load(path).num_samples == PROFILE.num_samples
    assert len(list(tmp_path.iterdir())) == 2


@given(st.text(), st.text(), st.text())
def test_file_names_are_safe(device, model, dtype):
    name = profile_path("folder", device, model, dtype).name
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789._-")
    assert not name.startswith(".")
    assert len(name) <= 200
    assert profile_path("folder", device, model, dtype).parent.name == "folder"


@given(st.tuples(st.text(), st.text(), st.text()), st.tuples(st.text(), st.text(), st.text()))
def test_different_keys_have_different_files(first, second):
    assert (profile_path("", *first) == profile_path("", *second)) == (first == second)


def test_the_name_is_readable():
    name = profile_path("", "NVIDIA H100 80GB HBM3", "facebook/opt-13b", "float16").name
    assert name.startswith("nvidia-h100-80gb-hbm3--facebook-opt-13b--float16--")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d.pop("block_size"), "field block_size is missing"),
        (lambda d: d.update(block_size="16"), "field block_size must be int, got '16'"),
        (lambda d: d.update(block_size=True), "field block_size must be int, got 'True'"),
        (lambda d: d.update(block_size=0), r"block_size must lie in \[1, 1024\], got 0"),
        (lambda d: d.update(device=""), "device must be a string that is not empty"),
        (lambda d: d.update(device=3), "field device must be str, got '3'"),
        (lambda d: d.update(extra=1), "field extra is unknown; expected format, "),
        (lambda d: d.update(format="other"), "field format must be jaxllm-profile, got 'other'"),
        (lambda d: d.update(format_version=3), "field format_version must be 4, got '3'"),
        (lambda d: d.update(format_version=5), "field format_version must be 4, got '5'"),
        (lambda d: d.update(padding_share=1.5), "padding_share is 1.5: expected 0 to 1"),
        (lambda d: d.update(model=[]), r"field model must be dict, got '\[\]'"),
        (lambda d: d["model"].pop("head_dim"), "field model.head_dim is missing"),
        (lambda d: d["model"].update(colour=1), "field model.colour is unknown"),
        (lambda d: d["model"].update(num_layers=-4), "ModelShape.num_layers must lie in"),
        (lambda d: d["model"].update(dtype="int3"), "ModelShape.dtype='int3' is not supported"),
        (lambda d: d.update(versions={"jax": 1}), "versions must map str to str, got 'jax': 1"),
        (lambda d: d.update(num_samples={"decode": "x"}), "num_samples must map str to int"),
        (lambda d: d.update(num_samples={"decode": -1}), r"num_samples\['decode'\] must lie in"),
        (lambda d: d["arrays"].pop("sha256"), "field arrays.sha256 is missing"),
        (lambda d: d["arrays"].update(sha256="0"), "with SHA-256 0: got "),
        (lambda d: d["arrays"].update(num_bytes=1), "expects 1 bytes"),
        (lambda d: d["arrays"]["shapes"].update(swap_blocks=[1]), "field arrays.shapes must be"),
    ],
)
def test_wrong_fields_are_named(tmp_path, edit, message):
    path = edited(PROFILE.save(tmp_path), edit)
    with pytest.raises(ProfileError, match=message) as caught:
        Profile.load(path)
    assert path.name.removesuffix(".json") in str(caught.value)
    assert "measure again" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"swap_in_seconds": None}, r"missing \['swap_in_seconds'\]"),
        (
            {"swap_in_seconds": np.zeros(3)},
            r"swap_in_seconds has shape \(3,\); its axes \(swap_blocks\) make",
        ),
        ({"mixed_seconds": None}, r"missing \['mixed_seconds'\]"),
        ({"mixed_seconds": np.zeros((1, 1, 1))}, r"mixed_seconds has shape \(1, 1, 1\); its axes"),
        (
            {"mixed_seconds": PROFILE.table.to_arrays()["mixed_seconds"] - 1e9},
            "must hold finite seconds of at least 0",
        ),
        ({"swap_blocks": np.array([[1]])}, "axis swap_blocks must be a vector"),
        ({"decode_seconds": np.array(["a"])}, "decode_seconds must be an array of float64"),
        ({"decode_seconds": np.array([print])}, "allow_pickle=False"),
        ({"unexpected": np.zeros(1)}, r"unknown \['unexpected'\]"),
    ],
)
def test_wrong_arrays_are_named(tmp_path, changes, message):
    path = with_arrays(PROFILE.save(tmp_path), **changes)
    with pytest.raises(ProfileError, match=message) as caught:
        Profile.load(path)
    assert ".npz" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a": NaN}'])
def test_a_file_that_is_not_json(tmp_path, content):
    path = PROFILE.save(tmp_path)
    path.write_bytes(content)
    with pytest.raises(ProfileError, match=r"is not JSON: .*; measure again with `jaxllm profile`"):
        Profile.load(path)
    path.write_bytes(b"[1]")
    with pytest.raises(ProfileError, match="must hold a JSON object, got list"):
        Profile.load(path)


def test_missing_and_enormous_files(tmp_path, monkeypatch):
    path = PROFILE.save(tmp_path)
    with pytest.raises(ProfileError, match=r"cannot read profile .*nowhere\.json: No such file or directory"):
        Profile.load(tmp_path / "nowhere.json")
    monkeypatch.setattr("jaxllm.predictors.store._MAX_FILE_BYTES", 100)
    with pytest.raises(ProfileError, match="a profile has at most 100"):
        Profile.load(path)
    monkeypatch.undo()
    path.with_suffix(".npz").unlink()
    with pytest.raises(ProfileError, match=r"cannot read profile .*\.npz: No such file"):
        Profile.load(path)


@given(data=st.data())
def test_damaged_bytes_never_load(tmp_path_factory, data):
    path = PROFILE.save(tmp_path_factory.mktemp("profile"))
    npz = path.with_suffix(".npz")
    content = bytearray(npz.read_bytes())
    if data.draw(st.booleans()):
        position = data.draw(st.integers(0, len(content) - 1))
        content[position] ^= data.draw(st.integers(1, 255))
    else:
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    npz.write_bytes(content)
    with pytest.raises(ProfileError, match="does not belong to"):
        Profile.load(path)


@given(st.binary(max_size=200))
def test_any_bytes_with_the_right_checksum_are_refused_cleanly(tmp_path_factory, content):
    path = PROFILE.save(tmp_path_factory.mktemp("profile"))
    path.with_suffix(".npz").write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    edited(path, lambda document: document["arrays"].update(num_bytes=len(content), sha256=digest))
    with pytest.raises(ProfileError, match="measure again"):
        Profile.load(path)


def test_a_profile_of_something_else_is_refused_with_every_difference():
    other = dataclasses.replace(LLAMA, num_layers=2, dtype="float32")
    with pytest.raises(ProfileError) as caught:
        PROFILE.check_matches(device="cpu", model=other, block_size=32)
    for difference in (
        "device 'NVIDIA H100 80GB HBM3', not 'cpu'",
        "block_size 16, not 32",
        "model.num_layers 40, not 2",
        "model.dtype 'bfloat16', not 'float32'",
    ):
        assert difference in str(caught.value)
    assert issubclass(ProfileError, JaxllmError)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device": ""}, "device must be a string"),
        ({"errors": {"decode": float("nan")}}, "errors must hold JSON values"),
        ({"errors": {"decode": object()}}, "errors must hold JSON values"),
        ({"versions": ["jax"]}, "versions must be a mapping"),
    ],
)
def test_profiles_that_could_not_be_read_again_are_not_made(change, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(PROFILE, **change)
