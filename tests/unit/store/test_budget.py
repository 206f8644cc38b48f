"""How much has to go for a portion of chunks."""

from __future__ import annotations

from kvrag.store.budget import limit_for


def test_nothing_goes_while_there_is_room_and_enough_goes_when_there_is_none() -> None:
    assert limit_for(needed=5, used=95, budget=100) is None
    assert limit_for(needed=6, used=95, budget=100) == 80 - 6, "down to the low watermark, with the portion"
    assert limit_for(needed=90, used=95, budget=100) == 0
