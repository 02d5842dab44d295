"""Every family of language models that the installed transformers builds from its config alone."""

import copy
import warnings

import pytest
import torch

from deep_optimizer_states.predict import huggingface
from deep_optimizer_states.predict.memory import GIB
from ds_config.advise import NodeMemory, Training, ladder

LAYERS = {*huggingface.LAYER_COUNTS, "num_layers", "n_layer", "n_layers", "encoder_layers"}
SEQUENCE = 64
MEASURED_AT_LEAST = 0.9


def families():
    # Not where files are collected: each worker of the tests would import it, for seconds.
    from transformers.models.auto import modeling_auto

    return sorted(
        {
            *modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
            *modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
            *modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        }
    )


def with_few_layers(table, most=2):
    """Widths fit together in a family's own defaults, so that layers alone are taken away."""
    found = copy.deepcopy(table)
    for part in (found, found.get("text_config")):
        for name in LAYERS & set(part or ()):
            count = part[name]
            if isinstance(count, int) and count > most:
                lists = [key for key, value in part.items() if isinstance(value, list)]
                part.update({key: part[key][:most] for key in lists if len(part[key]) == count})
                part[name] = most
    return found


def is_built(table):
    """Whether transformers itself makes a model of it."""
    import transformers

    try:
        config = transformers.AutoConfig.for_model(**(table.get("text_config") or table))
        with torch.device("meta"):
            huggingface.language_model(config)
    except Exception:  # noqa: BLE001 - whatever the code of a model raises
        return False
    return True


def table_of(family):
    """The family's own defaults with few layers, or all of them; None where none makes a model."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        table = {**CONFIG_MAPPING[family]().to_dict(), "model_type": family}
    except Exception:  # noqa: BLE001 - the family has no defaults
        return None
    return next((made for made in (with_few_layers(table), table) if is_built(made)), None)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_every_family_is_measured_or_named_with_what_is_still_known():
    """Ask for advice on each, too: there is no way in which it may end but with rungs."""
    import transformers

    transformers.logging.set_verbosity_error()
    unknown, asked = {}, 0
    for family in families():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            table = table_of(family)
            if table is None:
                continue
            asked += 1
            model = huggingface.model_of_config(table, family)
            rungs = ladder(
                Training(model, SEQUENCE, 4, "bf16"), NodeMemory(1, 1, 10**6 * GIB, 10**6 * GIB)
            )
        for rung in rungs[:4]:
            assert rung.peaks.device_bytes > 14 * model.numel, (family, rung.name)
        if reason := rungs[0].unknown:
            unknown[family] = reason
            assert "\n" not in reason
            assert reason.startswith("a forward of it on tensors without memory fails: ")
        else:
            kept = model.kept_of()(2, SEQUENCE, True)
            assert kept.layer + kept.head > 0
    print(f"{asked} families, not measured: {unknown}")
    assert asked > len(families()) / 2
    assert len(unknown) < (1 - MEASURED_AT_LEAST) * asked
