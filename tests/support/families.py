# ruff: noqa: RUF001  (DeepSeek's tokens hold those characters)
"""Small models of each family that the codec knows: a tokenizer with the family's special tokens, made on the spot, and
a template of its shape in our words (chat_templates/)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from penstock_codec import TokenizerFiles, tiny_tokenizer

TEXTS = ["You are a shell agent. Read the note, then write the file: héllo wörld €. List the files, please.\n"] * 4
TEMPLATES = Path(__file__).parent / "chat_templates"


def template(name: str) -> str:
    """The text of one of our templates."""
    return (TEMPLATES / f"{name}.jinja").read_text("utf-8")


_LLAMA = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
)
_LLAMA4 = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|header_start|>", "<|header_end|>", "<|eom|>", "<|eot|>"),
    *("<|python_start|>", "<|python_end|>"),
)
_GRANITE = ("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>")
_MISTRAL = (
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
)
_MISTRAL_NEW = (*_MISTRAL, "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]")
_KIMI = (
    "[BOS]",
    "<|im_end|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|im_middle|>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
_GLM = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_GLM_MARKUP = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
_HARMONY = (
    *("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>"),
    *("<|message|>", "<|call|>"),
)
_DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")
_DEEPSEEK_MARKUP = (
    "<think>",
    "</think>",
    *(
        f"<｜tool▁{name}｜>"
        for name in (
            *("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep"),
            *("outputs▁begin", "outputs▁end", "output▁begin", "output▁end"),
        )
    ),
)

FAMILIES: Mapping[str, tiny_tokenizer.Family] = {
    "chatml": tiny_tokenizer.Family(tiny_tokenizer.chat_template()),
    "qwen3": tiny_tokenizer.Family(template("qwen3")),
    "qwen3_coder": tiny_tokenizer.Family(template("qwen3_coder")),
    "llama3": tiny_tokenizer.Family(template("llama3"), _LLAMA, (), "<|eot_id|>", ("<|eom_id|>",), "<|begin_of_text|>"),
    # A vocabulary without a token for the tag: calls are bare, and nothing but their JSON tells them.
    "llama3_bare": tiny_tokenizer.Family(
        template("llama3"), tuple(text for text in _LLAMA if text != "<|python_tag|>"), (), "<|eot_id|>", (), _LLAMA[0]
    ),
    "llama4": tiny_tokenizer.Family(template("llama4"), _LLAMA4, (), "<|eot|>", (), "<|begin_of_text|>"),
    "granite": tiny_tokenizer.Family(template("granite"), _GRANITE, (), "<|end_of_text|>"),
    "mistral": tiny_tokenizer.Family(template("mistral"), _MISTRAL_NEW, (), "</s>", (), "<s>"),
    "kimi": tiny_tokenizer.Family(template("kimi"), _KIMI, ("<think>", "</think>"), "<|im_end|>", (), "[BOS]"),
    "deepseek": tiny_tokenizer.Family(
        template("deepseek"),
        _DEEPSEEK,
        _DEEPSEEK_MARKUP,
        "<｜end▁of▁sentence｜>",
        (),
        _DEEPSEEK[0],
    ),
    "glm": tiny_tokenizer.Family(
        template("glm"), _GLM, _GLM_MARKUP, "<|user|>", ("<|observation|>", "<|endoftext|>"), "<|endoftext|>"
    ),
    "harmony": tiny_tokenizer.Family(
        template("harmony"), _HARMONY, (), "<|return|>", ("<|call|>", "<|endoftext|>"), "<|startoftext|>"
    ),
    "thinks_on_request": tiny_tokenizer.Family(template("thinks_on_request")),
    "hears_users": tiny_tokenizer.Family(template("hears_users")),
    # Templates of other shapes than anyone's; the last ends a prompt inside reasoning.
    "shows_call_ids": tiny_tokenizer.Family(template("shows_call_ids")),
    "system_first": tiny_tokenizer.Family(template("system_first")),
    "strips_old_reasoning": tiny_tokenizer.Family(template("strips_old_reasoning")),
}
"""Families whose templates let a conversation go on exactly."""

MOVING: Mapping[str, tiny_tokenizer.Family] = {
    "mistral_v3": tiny_tokenizer.Family(template("mistral_v3"), _MISTRAL, (), "</s>", (), "<s>"),
    "rewrites_history": tiny_tokenizer.Family(template("rewrites_history")),
}
"""Families whose templates rewrite what was said before."""


def build(name: str) -> TokenizerFiles:
    """The files of one of them."""
    return {**FAMILIES, **MOVING}[name].build(TEXTS)
