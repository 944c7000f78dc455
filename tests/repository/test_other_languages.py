"""The .proto files become code of other languages without further options, and what of it can be compiled here does.

A language's tools are those of Debian: `protobuf-compiler`, `libprotobuf-java`, `golang-go`, `protoc-gen-go-1-5` and
`golang-google-protobuf-dev`. A test whose tools are absent is skipped, and says which.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from grpc_tools import protoc

LANGUAGES = ("java", "csharp", "ruby", "php", "python", "objc", "cpp", "kotlin")
"""Those that protoc writes by itself."""


def tool(name: str, package: str) -> str:
    """The path of a program; without it the test is skipped."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"needs {name}, as of Debian's {package}")
    return found


def generate(root: Path, language: str, out: Path) -> None:
    """Writes the code of every file, and requires that nothing is said."""
    sources = sorted(path.relative_to(root / "proto").as_posix() for path in (root / "proto").rglob("*.proto"))
    assert len(sources) > 15
    well_known = Path(protoc.__file__).parent / "_proto"
    command = [tool("protoc", "protobuf-compiler"), f"--proto_path={root / 'proto'}", f"--proto_path={well_known}"]
    ended = subprocess.run([*command, f"--{language}_out={out}", *sources], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def compile_all(command: list[str], environment: dict[str, str] | None = None, cwd: Path | None = None) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=cwd)
    assert ended.returncode == 0, ended.stderr[-2000:]


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_language_is_generated_without_options(root: Path, tmp_path: Path, language: str) -> None:
    generate(root, language, tmp_path)
    assert sum(path.is_file() for path in tmp_path.rglob("*")) >= len(list((root / "proto").rglob("*.proto")))


def test_java_compiles_and_has_the_classes_of_the_documents(root: Path, tmp_path: Path) -> None:
    javac = tool("javac", "openjdk-17-jdk-headless")
    jars = [Path(entry) for entry in (*os.environ.get("CLASSPATH", "").split(":"), "/usr/share/java/protobuf.jar")]
    jar = next((jar for jar in jars if jar.name.startswith("protobuf") and jar.is_file()), None)
    if jar is None:
        pytest.skip("needs protobuf.jar, as of Debian's libprotobuf-java")
    generate(root, "java", tmp_path)
    sources = list(map(str, tmp_path.rglob("*.java")))
    out = tmp_path / "classes"
    compile_all([javac, "-nowarn", "-proc:none", "-cp", str(jar), "-d", str(out), *sources])
    text = (root / "docs" / "clients.md").read_text(encoding="utf-8")
    named = [name for name in re.findall(r"^import (headway[\w.]+);", text, re.MULTILINE) if not name.endswith("Grpc")]
    assert named
    assert [name for name in named if not (out / f"{name.replace('.', '/')}.class").is_file()] == []


def test_go_compiles(root: Path, tmp_path: Path) -> None:
    go = tool("go", "golang-go")
    tool("protoc-gen-go", "protoc-gen-go-1-5")
    libraries = Path(os.environ.get("GOPATH", "/usr/share/gocode"))
    if not (libraries / "src" / "google.golang.org" / "protobuf").is_dir():
        pytest.skip("needs google.golang.org/protobuf, as of Debian's golang-google-protobuf-dev")
    (tmp_path / "src").mkdir()
    generate(root, "go", tmp_path / "src")
    own = {"GO111MODULE": "off", "GOPATH": f"{tmp_path}:{libraries}", "GOCACHE": str(tmp_path / "cache")}
    compile_all([go, "build", "headway/..."], os.environ | own)
