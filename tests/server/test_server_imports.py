"""What importing the server brings in."""

import subprocess
import sys

PROGRAM = """
import importlib, pkgutil, sys
import headway_server
for module in pkgutil.walk_packages(headway_server.__path__, "headway_server."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
forbidden = {"torch", "onnx", "onnxscript", "headway_training", "headway_export", "headway_client"}
print(len([name for name in sys.modules if name.startswith("headway_server")]))
print(sorted(forbidden & set(sys.modules)))
"""


def test_every_module_of_the_server_imports_without_torch_onnx_or_the_other_distributions():
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True)
    count, found = ended.stdout.splitlines()
    assert int(count) > 30
    assert found == "[]"
