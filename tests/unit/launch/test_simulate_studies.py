"""``--simulate`` of every shipped study: predicted, or one line that says why it cannot be."""

import pytest

from configs.errors import ConfigError
from configs.study import load_study, study_names
from launch.sweep import main

WHY_NOT = {
    "imdb": "model = 'roberta-small': ",
    "optimus-cc": "pp = 4: the performance model knows no pipeline; `python -m optimus_cc",
    "zero-ladder": "model = 'gpt2': ",
}
"""Studies of which the performance model knows no point, and what their line says."""


@pytest.mark.parametrize("name", study_names())
def test_a_shipped_study_is_simulated_or_says_in_a_line_why_not(name, tmp_path, capsys):
    words = ["--study", name, "--simulate", "--machine", "h100x4", "--no-report"]
    words += ["--results-dir", str(tmp_path)]
    if name not in WHY_NOT:
        assert main(words) == 0
        assert "simulated, nothing was run: " in capsys.readouterr().out.splitlines()[-1]
        return
    study = load_study(name)
    sweep = study.default_sweep
    with pytest.raises(ConfigError) as caught:
        main(words)
    message = str(caught.value)
    assert message.startswith(
        f"--simulate: no point of sweep '{sweep}' of study '{name}' can be predicted: "
    )
    assert WHY_NOT[name] in message
    assert "on a machine other than" not in message, "none can"
    assert "\n" not in message
    assert capsys.readouterr().out == ""
    assert list(tmp_path.iterdir()) == []
