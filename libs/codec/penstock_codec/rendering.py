"""Renders a conversation to text and ids, and keeps control tokens spelled in its texts apart from the template's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock_codec.chat import Message, Tool
from penstock_codec.control_text import Breaking, ControlText
from penstock_codec.fast_dataclass import quick
from penstock_codec.segments import Segments
from penstock_codec.template import ChatTemplate

IntArray = NDArray[np.int32]


@quick
@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation's text. Only `Rendering.ids` reads it: it may contain breaks.

    `broken`: it does. `mixed_up`: the template changed a broken text, so that control tokens in it were encoded as such
    after all.
    """

    text: str
    broken: bool = False
    mixed_up: bool = False


class Rendering:
    """Renders for one codec. Thread-safe."""

    def __init__(self, template: ChatTemplate, segments: Segments, apart: ControlText | None) -> None:
        """`apart` None: control tokens spelled in texts are encoded as control tokens."""
        self.template = template
        self._segments = segments
        self._apart = apart

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """As ChatTemplate.render."""
        apart = self._apart
        breaking = Breaking(apart) if apart is not None else None
        made = self.template.render(
            messages,
            tools,
            add_generation_prompt=add_generation_prompt,
            template_kwargs=template_kwargs,
            apart=breaking,
        )
        if apart is None or breaking is None or not breaking.broke:
            return Rendered(made)
        if not apart.is_damaged(made):
            return Rendered(made, broken=True)
        made = self.template.render(
            messages, tools, add_generation_prompt=add_generation_prompt, template_kwargs=template_kwargs
        )
        return Rendered(made, mixed_up=True)

    def ids(self, text: str, *, broken: bool) -> IntArray:
        """Returns the ids of a rendered text, or of a part of it; `broken` as it was rendered. CPU work."""
        apart = self._apart
        if apart is None or not broken:
            return self._segments.encode(text)
        arrays: list[IntArray] = []
        clean: list[str] = []
        for block in self._segments.blocks(text):
            if not apart.holds_breaks(block):
                clean.append(block)
                continue
            if clean:
                arrays.append(self._segments.encode("".join(clean)))
                clean = []
            arrays.append(apart.ids(block))
        if clean:
            arrays.append(self._segments.encode("".join(clean)))
        return np.concatenate(arrays)

    def shown(self, text: str) -> str:
        """Returns a rendered text, or a part of it, without breaks."""
        return text if self._apart is None else self._apart.whole(text)
