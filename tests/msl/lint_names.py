"""Names that a kernel may not define at program scope, because Metal's library has them too.

`using namespace metal` stands before every kernel. A function or variable of ours with the name of a type, template or
enumeration in `metal` makes every use of the name ambiguous; functions of the same name merely overload.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .lexer import Token

# Types and options of the standard library by chapter of the specification, from memory and public headers.
_TAKEN = frozenset(
    # data types, matrices, tensors
    "vec matrix array array_ref atomic packed_vec simdgroup_matrix tensor extents dextents tensor_handle "
    # textures and samplers
    "sampler access address s_address t_address r_address coord filter mag_filter min_filter mip_filter compare_func "
    "border_color component bias level gradient2d gradient3d gradientcube min_lod_clamp lod_clamp max_anisotropy "
    "sparse_color reduction "
    # stages, ray tracing, synchronisation
    "color depth interpolant intersector intersection_result ray mem_flags memory_order thread_scope mesh "
    "visible_function_table command_buffer compute_command render_command "
    # type traits and limits
    "conditional decay enable_if extent rank integral_constant true_type false_type is_same is_void numeric_limits "
    "remove_cv remove_reference add_const make_signed make_unsigned underlying_type common_type".split()
)


def taken_names(
    tokens: Sequence[Token], part: str, metal: int, types: frozenset[str]
) -> Iterator[tuple[Token, str, str]]:
    """Functions, types and variables defined at program scope."""
    if part != "header":
        return
    depth = 0
    for i, token in enumerate(tokens):
        depth += (token.text in ("{", "(")) - (token.text in ("}", ")"))
        if depth == 0 and token.kind == "name" and token.text in _TAKEN and _defines(tokens, i):
            yield (
                token,
                "taken",
                f"'{token.text}' is also a name of Metal's library: every use of it would be ambiguous",
            )


def _defines(tokens: Sequence[Token], i: int) -> bool:
    """Whether the name at i is what a declaration introduces, not a type that it uses."""
    before, after = tokens[i - 1] if i else None, tokens[i + 1].text if i + 1 < len(tokens) else ""
    if before is None or before.text in ("::", ".", "->"):
        return False
    if before.text in ("struct", "class", "enum", "using"):
        return True
    follows_type = before.kind == "name" or before.text in (">", "&", "*")
    return follows_type and after in ("(", "=", ";", "[")
