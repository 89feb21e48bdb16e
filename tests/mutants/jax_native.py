"""Planted bugs in the launches that a compiled computation of JAX makes without Python."""

from __future__ import annotations

from .bug import Bug

_NATIVE = "cuflash/jax/native"
_TESTS = "tests/unit/test_jax_native"
_LAUNCHES = f"{_TESTS}.py::test"
_TABLES = f"{_TESTS}_tables.py::test"
_REGISTERED = f"{_TESTS}_registration.py::test"
_DRIVER = f"{_TESTS}_driver.py::test"

_OF_THE_CALL = (
    Bug(
        "the handler leaves its context behind",
        f"{_NATIVE}/handler.py",
        "    call(of(driver, Driver.pop_context), (place,))\n",
        "",
        f"{_LAUNCHES}_the_context_of_the_thread_is_as_before",
    ),
    Bug(
        "the handler looks at few slots of the registry",
        f"{_NATIVE}/handler.py",
        "for _ in range(SLOTS):",
        "for _ in range(4):",
        f"{_TABLES}_tables_whose_numbers_meet_in_one_slot_are_told_apart",
    ),
    Bug(
        "the handler answers queries for other metadata",
        f"{_NATIVE}/handler.py",
        "!= xla.EXTENSION_METADATA:",
        "== 99:",
        f"{_REGISTERED}_what_is_not_asked_is_not_answered",
    ),
    Bug(
        "the handler speaks a later version than an XLA that does not say its own",
        f"{_NATIVE}/frame.py",
        "MINOR_WITHOUT_API = 1",
        "MINOR_WITHOUT_API = 3",
        f"{_REGISTERED}_an_xla_that_does_not_say_its_version_is_told_the_first",
    ),
    Bug(
        "the handler runs in other stages too",
        f"{_NATIVE}/handler.py",
        "!= xla.EXECUTE:",
        "> xla.EXECUTE:",
        f"{_LAUNCHES}_other_stages_do_nothing",
    ),
    Bug(
        "the handler takes the types of buffers for their addresses",
        f"{_NATIVE}/frame.py",
        "BUFFER_DATA, SCALAR_VALUE = 24, 8",
        "BUFFER_DATA, SCALAR_VALUE = 16, 8",
        f"{_LAUNCHES}_the_parameters_are_those_of_a_prepared_call",
    ),
)

_OF_THE_LAUNCH = (
    Bug(
        "the handler hands half of an address on",
        f"{_NATIVE}/launching.py",
        "address = _buffer(frame, xla.RETS, number)",
        "address = _buffer(frame, xla.RETS, number) & 0xFFFFFFFF",
        f"{_LAUNCHES}_the_parameters_are_those_of_a_prepared_call",
    ),
    Bug(
        "devices of the handler share an owner of their counters",
        f"{_NATIVE}/launching.py",
        "exchange(device + 8 * Device.owner, 0, stream)",
        "exchange(table + 8 * of(table, Table.devices) + 8 * Device.owner, 0, stream)",
        f"{_LAUNCHES}_each_device_has_a_counter_and_an_owner",
    ),
    Bug(
        "a failed capture draws from the counter of the handler's table",
        f"{_NATIVE}/launching.py",
        "if load32(status) == 0:",
        "if load32(status) != 1:",
        f"{_LAUNCHES}_a_captured_launch_has_a_counter_of_the_graph",
    ),
    Bug(
        "the handler writes no zero before a captured launch",
        f"{_NATIVE}/launching.py",
        "return call(of(driver, Driver.memset), (workspace + offset, 0, 1, stream))",
        "return 0",
        f"{_LAUNCHES}_a_captured_launch_has_a_counter_of_the_graph",
    ),
    Bug(
        "the handler cuts the number of an error",
        f"{_NATIVE}/said.py",
        "digits < 18",
        "digits < 8",
        f"{_LAUNCHES}_a_buffer_that_is_not_aligned_as_planned_is_refused",
    ),
)

_OF_THE_TABLE = (
    Bug(
        "the handler reads empty arrays where they are",
        f"{_NATIVE}/table.py",
        "            elif 0 not in spec.shape:\n",
        "            elif name in self._arguments:\n",
        f"{_LAUNCHES}_arrays_without_elements_are_anywhere",
    ),
    Bug(
        "the handler writes all unasked gradients to one place",
        f"{_NATIVE}/table.py",
        "records += [WORKSPACE, offset, 0, 0]",
        "records += [WORKSPACE, 0, 0, 0]",
        f"{_LAUNCHES}_gradients_that_nobody_asked_for_are_in_the_workspace",
    ),
    Bug(
        "the handler has a workspace where the first device has",
        f"{_NATIVE}/table.py",
        "any(part.planned.workspace_bytes for part in devices)",
        "bool(devices[0].planned.workspace_bytes)",
        f"{_LAUNCHES}_devices_may_be_of_different_kinds",
    ),
    Bug(
        "the handler's messages are longer than their room",
        f"{_NATIVE}/table.py",
        "[-(MOST_TEXT - 32) :]",
        "",
        f"{_TABLES}_what_does_not_fit_into_a_table_is_refused_or_cut",
    ),
    Bug(
        "the handler's workspace has no room to be aligned",
        "cuflash/jax/device.py",
        "needed + _ALIGNMENT if",
        "needed if",
        f"{_LAUNCHES}_the_workspace_fits_wherever_it_is",
    ),
    Bug(
        "tables of the handler have numbers without dtypes",
        "cuflash/jax/device.py",
        "(tuple(array.shape), str(array.dtype))",
        "(tuple(array.shape),)",
        f"{_TABLES}_a_computation_for_cuda_calls_the_handler",
    ),
    Bug(
        "tables of the handler have numbers with addresses",
        "cuflash/features/score_text.py",
        "field(default=None, repr=False)",
        "None",
        f"{_TABLES}_a_number_is_made_of_no_addresses",
    ),
    Bug(
        "divided computations of the handler are taken from elsewhere",
        "cuflash/jax/lowering.py",
        "not (parts and _may_be_taken())",
        "True",
        f"{_TABLES}_a_divided_computation_is_never_taken_from_another_process",
    ),
)

_OF_THE_PROCESS = (
    Bug(
        "the handler finds a number before its table",
        f"{_NATIVE}/registry.py",
        "2 * slot + 1] = address\n            self._words[2 * slot] = number",
        "2 * slot] = number\n            self._words[2 * slot + 1] = address",
        f"{_REGISTERED}_a_number_is_written_after_its_address",
    ),
    Bug(
        "each thread registers a handler",
        f"{_NATIVE}/registration.py",
        "    with _lock:",
        "    if True:",
        f"{_REGISTERED}_threads_that_ask_at_once_register_it_once",
    ),
    Bug(
        "the handler is not compiled where it cannot be kept",
        f"{_NATIVE}/registration.py",
        "contextlib.suppress(Exception)",
        "contextlib.suppress(OSError)",
        f"{_REGISTERED}_without_a_cache_it_is_compiled_all_the_same",
    ),
    Bug(
        "the handler of other sources is used",
        f"{_NATIVE}/stamp.py",
        '"launching", ',
        "",
        f"{_REGISTERED}_the_stamp_is_of_all_that_is_compiled",
    ),
    Bug(
        "the handler pushes contexts by an older function",
        f"{_NATIVE}/driver.py",
        '"cuCtxPushCurrent_v2"',
        '"cuCtxPushCurrent"',
        f"{_DRIVER}_functions_are_those_that_a_compiler_would_call",
    ),
    Bug(
        "counters of the handler are not yet 0",
        f"{_NATIVE}/driver.py",
        "        cupy.cuda.get_current_stream().synchronize()\n",
        "",
        f"{_DRIVER}_a_counter_is_0_before_any_stream_draws_from_it",
    ),
)

BUGS = (*_OF_THE_CALL, *_OF_THE_LAUNCH, *_OF_THE_TABLE, *_OF_THE_PROCESS)
