"""``walk_spark.py``: the driver of one ``pyhvd.spark.run`` on 2 ranks of a cluster on this machine.

Every process of the run writes its calls into a folder; walk.py has prepared the environment for that.
"""

from __future__ import annotations

import atexit
import os
import sys
import tempfile
import threading
from pathlib import Path

import walk_recorder

SETTINGS = {
    "spark.driver.memory": "512m",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.executor.memory": "512m",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}


def train() -> int:
    """Be a rank: init() is not part of the walk, but what it has the driver and the task do is."""
    profile = sys.getprofile()
    sys.setprofile(None)
    threading.setprofile(None)
    import pyhvd as hvd

    hvd.init()
    rank: int = hvd.rank()
    hvd.shutdown()
    atexit.register(sys.setprofile, None)  # what hvd does at exit is this function's doing
    sys.setprofile(profile)
    return rank


def home_of_its_own(folder: Path) -> Path:
    """Return a SPARK_HOME that may be written to: the workers of a local-cluster put their logs there."""
    import pyspark

    folder.mkdir()
    for entry in Path(pyspark.__file__).parent.iterdir():
        (folder / entry.name).symlink_to(entry)
    return folder


def main() -> None:
    """Walk, from the call to its result."""
    sys.setprofile(None)
    threading.setprofile(None)
    from pyspark.sql import SparkSession

    import pyhvd.spark

    with tempfile.TemporaryDirectory(prefix="pyhvd-walk-", ignore_cleanup_errors=True) as own:
        os.environ |= {
            "JAVA_HOME": pyhvd.spark.use_java(),
            "SPARK_HOME": str(home_of_its_own(Path(own) / "home")),
            "PYSPARK_PYTHON": sys.executable,
        }
        builder = SparkSession.builder.master("local-cluster[2,1,512]").appName("walk")
        for name, value in SETTINGS.items():
            builder = builder.config(name, value)
        session = builder.getOrCreate()
        walk_recorder.install_from_environment()
        result = pyhvd.spark.run(train, num_proc=2, start_timeout=90)
        sys.setprofile(None)
        threading.setprofile(None)
        session.stop()
    if result != [0, 1]:
        raise RuntimeError(f"the ranks returned {result}")


if __name__ == "__main__":
    main()
