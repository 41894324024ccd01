from pathlib import Path

import pytest
import yaml

from harnessrl.config import Config, load_config, to_yaml

QUICKSTART = Path(__file__).parent.parent / "examples" / "quickstart" / "config.yaml"


def test_defaults_print_as_yaml_that_loads_again() -> None:
    assert Config.model_validate(yaml.safe_load(to_yaml(Config(), comments=True))) == Config()


def test_overrides_win_over_the_file() -> None:
    assert load_config(QUICKSTART, ["optim.lr=0.5", "collect.group_size=3"]).optim.lr == 0.5


def test_paths_are_beside_the_file() -> None:
    config = load_config(QUICKSTART)
    assert config.data.train == str(QUICKSTART.parent / "train.jsonl")
    assert config.agent.local and config.agent.local.cwd == str(QUICKSTART.parent)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("collect.group_sise=3", "did you mean 'collect.group_size'"),
        ("optim.learning_rate=3", "unknown key 'optim.learning_rate'"),
        ("train.updates=-1", "train.updates"),
        ("optim.lr=fast", "optim.lr"),
        ("nonsense", "key=value"),
        ("seed.x=1", "'seed' is not a section"),
        ("name=a: b: c", "not valid YAML"),
        ("model.path=[", "not valid YAML"),
        ("agent.local.comand=[a]", "did you mean 'agent.local.command'"),
    ],
)
def test_mistakes_are_explained(override: str, said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("'", ".").replace("[", ".")) as raised:
        load_config(QUICKSTART, ["seed=1", override])
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("text", ["a: [", "- 1\n", "model: 3\n"])
def test_broken_files_are_explained(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ValueError) as raised:
        load_config(tmp_path / "c.yaml")
    assert "\n" not in str(raised.value)
