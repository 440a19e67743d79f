"""Options of searches, and what they select from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import datasets
from ..selection import spaces
from ..selection.trials import check_ensemble

PAPER = {"paper-att": "attention", "paper-sum": "sum"}
search_option = partial(typer.Option, rich_help_panel="Search")


@dataclass
class SearchOptions:
    """What is searched, and by how many processes."""

    space: Annotated[
        str,
        search_option(
            help="What to select from: spin, the whole family of models, and linear ones of subtree counts; paper-att "
            "or paper-sum, the paper's settings of its own datasets; or a JSON file of lists, such as "
            '{"num_hops": [2, 3], "hidden_features": [32]}.'
        ),
    ] = "spin"
    settings: Annotated[int, search_option(min=1, help="At most so many, drawn from the space.")] = 64
    ensemble: Annotated[int, search_option(min=0, help="Average the probabilities of so many of the best.")] = 0
    jobs: Annotated[int | None, search_option(min=1, help="Processes of one thread.", show_default="one per core")] = (
        None
    )

    @property
    def num_jobs(self) -> int:
        from joblib import cpu_count

        return cpu_count() if self.jobs is None else self.jobs

    @property
    def name(self) -> str:
        """The space, of a file its name."""
        return self.space if self.space == "spin" or self.space in PAPER else Path(self.space).name

    def candidates(self, source: datasets.Source, seed: int) -> tuple[list[Any], Sequence[int | None]]:
        """The settings to select from, and the budgets: of the paper's a plain grid, of others successive halving."""
        found: list[Any]
        if self.space in PAPER:
            found = [*spaces.draw(spaces.paper(source.title, PAPER[self.space]), self.settings, seed=seed)]  # type: ignore[arg-type]
        elif self.space == "spin":
            found = [*spaces.candidates(self.settings, one_hot=source.has_official_split, seed=seed)]
        elif Path(self.space).suffix == ".json":
            found = [*spaces.draw(spaces.read(self.space), self.settings, seed=seed)]
        else:
            raise ValueError(f"--space must be spin, {', '.join(PAPER)}, or a .json file, got {self.space}")
        budgets = (None,) if self.space in PAPER else spaces.budgets(found)
        check_ensemble(self.ensemble, len(found), len(budgets))
        return found, budgets
