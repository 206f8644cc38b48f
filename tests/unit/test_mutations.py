"""The mutations of `tests/mutations.py` still fit the code."""

from __future__ import annotations

import mutations
import pytest


@pytest.mark.parametrize("mutation", mutations.MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_fits(mutation: mutations.Mutation) -> None:
    mutations._path(mutations.ROOT, mutation)
    nearest = [(mutations.ROOT / "tests/unit" / name).resolve() for name in mutation.tests.split()]
    assert [str(path) for path in nearest if not path.exists()] == []
