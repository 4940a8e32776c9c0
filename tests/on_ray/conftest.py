"""Two Ray nodes on this machine, with a processor each, for all tests of this folder."""

import os
from pathlib import Path

import pytest
import ray
from cluster_helpers import OBJECT_STORE
from ray.cluster_utils import Cluster

# What Ray's own modules warn of themselves, and its sockets that the collector closes.
FILTERS = (
    r"ignore::DeprecationWarning:ray\..*",
    r"ignore::FutureWarning:ray\..*",
    "ignore:unclosed:ResourceWarning",
)


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            for text in FILTERS:
                item.add_marker(pytest.mark.filterwarnings(text))


@pytest.fixture(scope="session")
def cluster():
    """Two nodes; a test that removes one puts another in its place."""
    tests = f"{Path(__file__).parents[1]}"  # where workers find what tests send them
    os.environ["PYTHONPATH"] = os.pathsep.join([tests, *filter(None, [os.environ.get("PYTHONPATH")])])
    made = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 1,
            "object_store_memory": OBJECT_STORE,
            "include_dashboard": False,
        },
    )
    made.add_node(num_cpus=1, object_store_memory=OBJECT_STORE)
    ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
    yield made
    ray.shutdown()
    made.shutdown()
