"""Planted bugs in functions of scores on the host: checks, compilation, NumPy and JAX."""

from __future__ import annotations

from .bug import Bug

__all__ = ["BUGS"]

_FEATURE = "cuflash/features/score_mod.py"
_TEXT = "cuflash/features/score_text.py"
_DUAL = "cuflash/features/dual.py"
_ARGUMENT = "cuflash/score_mod.py"
_UNIT = "tests/unit/test_score_mod.py::test_"
_PLANNED = "tests/unit/test_score_mod_planned.py::test_"
_JAX = "tests/unit/test_jax_score_mod.py::test_"
_DIVIDED = "tests/unit/test_jax_features_divided.py::test_over_four_devices[score_mod]"
_DERIVATIVES = f"{_UNIT}derivatives_are_those_of_differences"
_NO_FUNCTION = f"{_UNIT}what_can_be_no_function_is_refused"

BUGS = (
    Bug(
        "NumPy's entries of a function do not repeat",
        _FEATURE,
        'place.batch % given["entries"]',
        "place.batch",
        f"{_JAX}mapped_entries_are_each_as_alone[False]",
    ),
    Bug(
        "NumPy's heads of a function do not repeat",
        _FEATURE,
        '(head + place.head) % given["heads"]',
        "head + place.head",
        f"{_JAX}mapped_sinks_leave_heads_as_they_are",
    ),
    Bug(
        "NumPy's part of a call begins at the first head",
        _FEATURE,
        "(head + place.head)",
        "(0 * head + place.head)",
        _DIVIDED,
    ),
    Bug(
        "NumPy's offset of a function is 0",
        _FEATURE,
        'place.j, given["position"]\n',
        "place.j, 0\n",
        f"{_PLANNED}numpy_reads_what_the_reference_does",
    ),
    Bug(
        "NumPy's index is not clamped behind its axis",
        _FEATURE,
        "np.clip(x, 0, n - 1)",
        "np.maximum(x, 0)",
        f"{_PLANNED}an_index_outside_an_axis_reads_the_nearest_element",
    ),
    Bug(
        "NumPy's index before its axis counts from the end",
        _FEATURE,
        "np.clip(x, 0, n - 1)",
        "np.minimum(x, n - 1)",
        f"{_PLANNED}an_index_outside_an_axis_reads_the_nearest_element",
    ),
    Bug(
        "a function without the scores is as steep as they are",
        _FEATURE,
        "DualArray(changed, 0.0)",
        "DualArray(changed, 1.0)",
        f"{_UNIT}a_function_without_the_scores_has_no_gradient",
    ),
    Bug(
        "arrays of 2^31 elements are counted in 32 bits",
        _FEATURE,
        'index = "int" if math.prod(array.shape) <= _MOST_OF_AXIS',
        'index = "int" if max(array.shape) <= _MOST_OF_AXIS',
        f"{_PLANNED}many_elements_are_counted_in_64_bits",
    ),
    Bug(
        "offsets of a function are of any size",
        _FEATURE,
        "if abs(request.position) > MAX_SEQLEN:",
        "if request.position > 2**40:",
        f"{_PLANNED}an_offset_is_within_the_lengths",
    ),
    Bug(
        "kernels of a function do not know its text",
        _FEATURE,
        '("score_mod_digest", score.digest)',
        '("score_mod_digest", "")',
        f"{_PLANNED}another_text_is_another_kernel",
    ),
    Bug(
        "functions of scores have the unit of raw products",
        _FEATURE,
        "        unit=1.0,\n",
        "",
        f"{_PLANNED}its_scores_are_in_natural_units",
    ),
    Bug(
        "whether a number is whole is no part of the text",
        _TEXT,
        "[number[:2] for number in self.numbers]",
        "[number[:1] for number in self.numbers]",
        f"{_PLANNED}another_text_is_another_kernel",
    ),
    Bug(
        "names in comments are used",
        _TEXT,
        r"""b", _COMMENTS.sub(" ", text)) is not None""",
        r"""b", text) is not None""",
        f"{_PLANNED}names_in_comments_are_not_used",
    ),
    Bug(
        "a text that knows keys alone knows no position",
        _TEXT,
        "_has(score.text, 'i', 'j')",
        "_has(score.text, 'i')",
        f"{_PLANNED}a_text_is_told_what_it_uses",
    ),
    Bug(
        "braces that close too much are let through",
        _TEXT,
        "        if depth < 0:\n            break\n",
        "",
        _NO_FUNCTION,
    ),
    Bug(
        "a directive may be spelt with a digraph",
        _TEXT,
        '"%:", ',
        "",
        _NO_FUNCTION,
    ),
    Bug(
        "numbers with an exponent alone are doubles",
        _TEXT,
        r"(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+)(?![\w.])",
        r"(?:[eE][+-]?\d+)?)(?![\w.])",
        f"{_UNIT}numbers_of_the_text_are_of_the_type_of_scores",
    ),
    Bug(
        "sizes of an array are in the order of its last axes",
        _TEXT,
        "for axis in range(array.axes))\n        members",
        "for axis in reversed(range(array.axes)))\n        members",
        f"{_PLANNED}sizes_of_an_array_are_in_the_order_of_its_axes",
    ),
    Bug(
        "NumPy's quotient rises with its divisor",
        _DUAL,
        "(1 / b, -y / b)",
        "(1 / b, y / b)",
        f"{_DERIVATIVES}[quotient]",
    ),
    Bug(
        "NumPy's power has no derivative by its exponent",
        _DUAL,
        "np.log(a) * y)",
        "0 * y)",
        f"{_DERIVATIVES}[power]",
    ),
    Bug(
        "NumPy's tanh has the slope of a cosine",
        _DUAL,
        "1 / np.cosh(x) ** 2",
        "1 / np.cosh(x)",
        f"{_DERIVATIVES}[tanh]",
    ),
    Bug(
        "NumPy's where has the slope of one branch",
        _DUAL,
        "x.slope if isinstance(x, DualArray) else 0.0 for x in (a, b)",
        "x.slope if isinstance(x, DualArray) else 0.0 for x in (a, a)",
        f"{_DERIVATIVES}[where]",
    ),
    Bug(
        "integers of a function are of 33 bits",
        _ARGUMENT,
        "<= whole < 2**31:",
        "<= whole < 2**32:",
        _NO_FUNCTION,
    ),
    Bug(
        "numbers of a function may be infinite",
        _ARGUMENT,
        "if not math.isfinite(real):",
        "if False:",
        _NO_FUNCTION,
    ),
    Bug(
        "a real number of a function is rounded",
        _ARGUMENT,
        "return name, False, real.hex()",
        "return name, False, float(np.float32(real)).hex()",
        f"{_PLANNED}numbers_are_kept_as_they_are",
    ),
    Bug(
        "arrays of a function have no axes",
        "cuflash/tensors.py",
        "if 0 < len(source) <= tensor.most_axes",
        "if len(source) <= tensor.most_axes",
        f"{_UNIT}what_can_be_no_array_is_refused",
    ),
    Bug(
        "arrays of a function may be empty",
        "cuflash/tensors.py",
        "sizes_fit = 0 not in source or not problem.has_pairs",
        "sizes_fit = True",
        f"{_UNIT}what_can_be_no_array_is_refused",
    ),
    Bug(
        "functions of JAX repeat after the heads of keys",
        "cuflash/jax/functions.py",
        'call.counting(arrays["q"].shape[-2])',
        'call.counting(arrays["k"].shape[-2])',
        f"{_JAX}mapped_sinks_leave_heads_as_they_are",
    ),
    Bug(
        "arrays of a function are a part of its structure",
        "cuflash/jax/functions.py",
        "(score_mod.parts[1], score_mod.parts[0])",
        "(score_mod.parts[1][:0], score_mod.parts[0])",
        f"{_JAX}it_is_a_pytree_of_its_arrays",
    ),
    Bug(
        "parts of a call of JAX do not know where a function begins",
        "cuflash/jax/partition.py",
        'for name in ("dropout_seed", PLACE) if first else ():',
        'for name in ("dropout_seed",) if first else ():',
        _DIVIDED,
    ),
    Bug(
        "functions of JAX have gradients of their arrays",
        "cuflash/jax/derivative.py",
        'raise ArgumentValueError("score_mod", "arrays whose gradients are asked for", expected)',
        "pass",
        f"{_JAX}there_is_no_gradient_of_its_arrays",
    ),
)
