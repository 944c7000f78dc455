"""What is in the images' Python environments, their licences, and what is known to be wrong with it.

    make sbom                                  # server-cpu and client
    python docker/sbom.py server-gpu

For each target it makes the environment that its image has (docker/make-environment.sh) and writes to build/sbom
TARGET.cdx.json, a CycloneDX list of the components, and TARGET-licences.txt. Then pip-audit asks the package index's
database of vulnerabilities about each version. Exit code 0 if nothing is known, 1 if something is or nothing can be
learned about a package, as where the database cannot be reached.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "sbom"
TOOLS = FOLDER / "tools"


def _run(*command: str | Path) -> int:
    sys.stderr.write(f"+ {' '.join(map(str, command))}\n")
    return subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHON": sys.executable}, check=False).returncode


def _must(*command: str | Path) -> None:
    if code := _run(*command):
        sys.exit(code)


def _licence(component: dict[str, Any]) -> str:
    """What a package declares: an SPDX expression, else identifiers, else names."""
    declared = component.get("licenses", [])
    if expressions := [each["expression"] for each in declared if "expression" in each]:
        return str(expressions[0])
    licences = [each["license"] for each in declared]
    named = [each["id"] for each in licences if "id" in each] or [
        each["name"].removeprefix("License :: OSI Approved :: ") for each in licences
    ]
    return " AND ".join(sorted(set(named))) or "none declared"


def list_components(target: str) -> list[str]:
    """Makes a target's environment and its lists; returns the packages of others, as name==version."""
    environment = FOLDER / target
    shutil.rmtree(environment, ignore_errors=True)
    _must("bash", "docker/make-environment.sh", target, environment)
    sbom = FOLDER / f"{target}.cdx.json"
    _must(
        TOOLS / "bin" / "cyclonedx-py", "environment", "--output-reproducible", "--of", "JSON", "-o", sbom, environment
    )
    components = json.loads(sbom.read_text(encoding="utf-8"))["components"]
    rows = sorted((each["name"].lower(), each["version"], _licence(each)) for each in components)
    table = "".join(f"{name:<44}{version:<16}{licence}\n" for name, version, licence in rows)
    (FOLDER / f"{target}-licences.txt").write_text(table, encoding="utf-8")
    return [f"{name}=={version}" for name, version, _ in rows if not name.startswith("headway-")]


def main(targets: list[str]) -> int:
    """Lists all targets and audits them together."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    _must(sys.executable, "-m", "venv", TOOLS)
    pip_install = (TOOLS / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check")
    _must(*pip_install, "--constraint", "constraints.txt", "cyclonedx-bom", "pip-audit")
    packages = sorted({package for target in targets for package in list_components(target)})
    requirements = FOLDER / "requirements.txt"
    requirements.write_text("\n".join(packages) + "\n", encoding="utf-8")
    # Strict: without it a package that the database could not be asked about counts as good.
    return _run(TOOLS / "bin" / "pip-audit", "--strict", "--no-deps", "--disable-pip", "--requirement", requirements)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["server-cpu", "client"]))
