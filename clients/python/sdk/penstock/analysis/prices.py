"""What model calls cost, by a table of prices: for display only, nothing is limited by it.

    currency: USD
    models:
      some-model: {prompt: 2.5, cached: 0.25, completion: 10}
      "qwen3-*": {prompt: 0.2, completion: 0.6}

Prices are per million tokens. A model is looked up by its name, then by the first pattern that matches it. `cached` is
of prompt tokens that came from a cache; without it they cost as others. Amounts are computed from the counts that were
recorded: a provider's bill may count otherwise.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.client.errors import InvalidArgument
from penstock.client.types.trajectories import Call

_MILLION = 1_000_000
_Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Price(BaseModel):
    """Of one model, per million tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt: _Amount
    completion: _Amount
    cached: _Amount | None = None


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    currency: str = Field(default="USD", min_length=1, max_length=16)
    models: Mapping[str, Price] = Field(min_length=1)


@dataclass(frozen=True, slots=True)
class Used:
    """Tokens of a model. `cached_tokens` are among the prompt's."""

    model: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Cost:
    """An amount of money, and the models that have no price and are not in it."""

    amount: float
    currency: str
    unpriced: tuple[str, ...] = ()

    def __str__(self) -> str:
        rest = f", without {', '.join(self.unpriced)}: no price" if self.unpriced else ""
        return f"{self.amount:.4f} {self.currency}{rest}"

    def as_dict(self) -> dict[str, Any]:
        """Returns it as JSON has it."""
        return {"amount": self.amount, "currency": self.currency, "unpriced": list(self.unpriced)}


class Prices:
    """A table of prices."""

    def __init__(self, models: Mapping[str, Price], currency: str = "USD") -> None:
        self.currency = currency
        self._models = dict(models)

    @classmethod
    def load(cls, file: Path) -> Self:
        """Reads a table. Raises InvalidArgument `PRICES_INVALID`, with the key."""
        try:
            table = _Table.model_validate(yaml.safe_load(file.read_bytes()))
        except OSError as error:
            raise InvalidArgument(f"{file} cannot be read: {error.strerror}", reason="PRICES_INVALID") from None
        except yaml.YAMLError as error:
            raise InvalidArgument(f"{file} is no YAML: {error}", reason="PRICES_INVALID") from None
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise InvalidArgument(f"{file}: {place or 'the file'}: {first['msg']}", reason="PRICES_INVALID") from None
        return cls(table.models, table.currency)

    def cost(self, used: Iterable[Used]) -> Cost:
        """Returns what these tokens cost."""
        amount, unpriced = 0.0, set()
        for one in used:
            price = self._price(one.model)
            if price is None:
                unpriced.add(one.model or "a model without a name")
                continue
            cached = price.prompt if price.cached is None else price.cached
            fresh = one.prompt_tokens - one.cached_tokens
            amount += fresh * price.prompt + one.cached_tokens * cached + one.completion_tokens * price.completion
        return Cost(amount / _MILLION, self.currency, tuple(sorted(unpriced)))

    def _price(self, model: str) -> Price | None:
        found = self._models.get(model)
        patterns = (price for pattern, price in self._models.items() if fnmatchcase(model, pattern))
        return next(patterns, None) if found is None else found


def paid(calls: Iterable[Call]) -> dict[str, Used]:
    """Returns the tokens of calls that a model answered for their rollout, by the id of the call that was sampled.

    An answer that a further attempt of the rollout replayed was sampled in an earlier one: it has the earlier call's
    id, so that it counts once where that call is known too. What was replayed from another rollout was sampled for
    that one, and what was given for none.
    """
    found: dict[str, Used] = {}
    for call in calls:
        done, origin = call.completion, call.replayed_from
        if done is None or call.given or (origin is not None and origin.rollout_id != call.rollout_id):
            continue
        found[call.call_id if origin is None else origin.call_id] = Used(
            done.model or call.model_requested,
            call.prompt_count or (0 if done.usage is None else done.usage.prompt_tokens),
            call.sampled_count or (0 if done.usage is None else done.usage.completion_tokens),
            0 if done.usage is None else done.usage.cached_tokens or 0,
        )
    return found


def used(calls: Iterable[Call]) -> list[Used]:
    """Returns the tokens of calls as `paid` does, without the ids."""
    return list(paid(calls).values())


def by_model(found: Iterable[Used]) -> tuple[Used, ...]:
    """Returns the sums of each model, in the order of their names."""
    sums: dict[str, Used] = {}
    for one in found:
        before = sums.get(one.model, Used(one.model, 0, 0))
        sums[one.model] = Used(
            one.model,
            before.prompt_tokens + one.prompt_tokens,
            before.completion_tokens + one.completion_tokens,
            before.cached_tokens + one.cached_tokens,
        )
    return tuple(sums[name] for name in sorted(sums))
