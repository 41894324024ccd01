"""Who may import whom (docs: CONTRIBUTING.md): the components meet through `schemas` and `client` only."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "harnessrl"
TRAINER_MATHS = {f"trainer.{name}" for name in ("group", "rollout", "rows", "trajectory")}
COMPONENTS = {
    "schemas": set(),
    "client": {"schemas"},
    "config": {"schemas", "trainer.algorithm"},
    "engine": {"schemas"},
    "gateway": {"schemas", "client", "config"},
    "controller": {"schemas", "client", "config"},
    "trainer": {"schemas", "client", "config", "engine"},
    "dashboard": {"schemas", "client", "config", "gateway", *TRAINER_MATHS},
}
ONLY_IN = {
    "torch": ("engine/", "trainer/"),
    "verl": ("trainer/backends/verl",),
    "ray": ("trainer/backends/verl",),
    "kubernetes_asyncio": ("controller/kubernetes.py",),
}


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found


FILES = sorted(SOURCE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_follow_the_arrows(path: Path) -> None:
    here = path.relative_to(SOURCE).as_posix()
    component = here.split("/")[0].removesuffix(".py")
    for name in imports(path):
        for library, places in ONLY_IN.items():
            if name.split(".")[0] == library:
                assert here.startswith(places), f"{here} imports {library}, which belongs in {places}"
        if name.startswith("harnessrl.") and component in COMPONENTS:
            target = name.removeprefix("harnessrl.")
            allowed = {component, *COMPONENTS[component]}
            assert any(target == a or target.startswith(f"{a}.") for a in allowed) or target == "__version__", (
                f"{here} imports {name}; {component} may import {sorted(allowed)}"
            )
