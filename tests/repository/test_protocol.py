"""The .proto files by the rules of buf, which tools of other languages are made for."""

import shutil
import subprocess
from pathlib import Path

import pytest
from google.protobuf.descriptor import FileDescriptor
from node_packages import install

from headway_server.services import service_descriptors

OPTIONS = ("csharp_namespace", "go_package", "java_package", "php_namespace", "ruby_package")


BASELINE = "baseline.binpb.gz"


@pytest.fixture(scope="module")
def buf(pytestconfig: pytest.Config) -> Path:
    return install(pytestconfig, "buf") / ".bin" / "buf"


def test_the_protocol_keeps_to_bufs_rules(buf: Path, root: Path) -> None:
    ran = subprocess.run([buf, "lint"], cwd=root / "proto", capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_protocol_breaks_no_program_of_the_baseline(buf: Path, root: Path, tmp_path: Path) -> None:
    """`make proto-baseline` takes the protocol as it is for the new baseline: for a release that may break programs."""
    breaking = [buf, "breaking", "--against", root / "proto" / BASELINE]
    ran = subprocess.run(breaking, cwd=root / "proto", capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    changed = shutil.copytree(root / "proto", tmp_path / "proto")
    common = changed / "headway" / "v1" / "common.proto"
    common.write_text(common.read_text().replace("float min_p = 4", "float min_p = 6"))
    ran = subprocess.run(breaking, cwd=changed, capture_output=True, text=True, check=False)
    assert ran.returncode != 0, "a field that moved is a break"
    assert "min_p" in ran.stdout


def test_every_file_says_what_its_package_is_called_in_other_languages() -> None:
    def options(file: FileDescriptor) -> list[str]:
        return [getattr(file.GetOptions(), name) for name in OPTIONS]

    files = {
        file.name: file
        for service in service_descriptors()
        for file in (service.file, *service.file.dependencies)
        if file.package == "headway.v1"
    }
    assert len(files) > 10
    told = {name: options(file) for name, file in files.items()}
    assert all(all(each) for each in told.values()), told
    assert len({tuple(each) for each in told.values()}) == 1


def test_every_file_has_a_package_of_go_which_the_compiler_demands() -> None:
    packages = {service.file.name: service.file.GetOptions().go_package for service in service_descriptors()}
    assert all(packages.values()), packages
