"""Old public paths work for one version, with a warning that names the new one."""

import importlib
import sys

import pytest

from ds_bert.deprecated_paths import MOVED

NAMES = {
    "ds_bert.data.prepare": "prepare",
    "ds_bert.modeling.cpu_dropout": "use_cpu_dropout",
    "ds_bert.reduction.engine": "attach_to_engine",
    "ds_bert.vocabulary_projection": "VocabularyProjection",
}


@pytest.mark.parametrize("old", sorted(MOVED))
def test_an_old_path_gives_the_same_object_and_warns(old):
    sys.modules.pop(old, None)
    with pytest.warns(FutureWarning, match=f"{old} has moved to {MOVED[old]}"):
        module = importlib.import_module(old)
    assert getattr(module, NAMES[old]) is getattr(importlib.import_module(MOVED[old]), NAMES[old])


def test_a_name_that_never_was_is_missing():
    with pytest.raises(ModuleNotFoundError, match=r"ds_bert\.never"):
        importlib.import_module("ds_bert.never")
