"""The .proto files by the rules of buf, which tools of other languages are made for."""

import subprocess
from pathlib import Path

import pytest
from google.protobuf.descriptor import FileDescriptor
from node_packages import install

from headway_server.services import service_descriptors

OPTIONS = ("csharp_namespace", "go_package", "java_package", "php_namespace", "ruby_package")


def test_the_protocol_keeps_to_bufs_rules(pytestconfig: pytest.Config, root: Path) -> None:
    buf = install(pytestconfig, "buf") / ".bin" / "buf"
    ran = subprocess.run([buf, "lint"], cwd=root / "proto", capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


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
