"""Compile every kernel of a local step for a GPU that need not be there, and print what each needs, as JSON lines.

    python -m tests.compile_kernels CHUNK TOPK VALUES UPDATE NUM_REPLICAS [BALANCE]

Launches are caught before they reach a device, and compiled with the arguments they were made with. Not for Triton's
interpreter: TRITON_INTERPRET must not be set.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import nn
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

HOPPER = GPUTarget("cuda", 90, 32)
OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")
TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.int32: "i32", torch.int64: "i64"}
Launch = tuple[JITFunction, tuple[Any, ...], dict[str, Any]]


def launches(chunk: int, topk: int, values: str, update: str, num_replicas: int, balance: float = 0.0) -> list[Launch]:
    """The launches of one step, one of each kernel."""
    from thinwire.core.combine import Decoding
    from thinwire.core.scratch import Scratch
    from thinwire.core.update_rules import UPDATE_RULES, Hyper
    from thinwire.exchange.plan import Coding, TensorSpec, make_plan
    from thinwire.fused_stack import FusedStack
    from thinwire.kernels.checks import inspect_, judge_
    from thinwire.slabs import LocalTensor
    from thinwire.stack_step import GroupStep

    shape = (2 * chunk, 2 * chunk)
    plan = make_plan([TensorSpec("p", shape, "torch.float32", 0)], [Coding(chunk, topk, values, "adaptive", 0)])
    (bucket,) = plan.buckets
    (stack,) = bucket.stacks
    parameter = nn.Parameter(torch.zeros(shape))
    parameter.grad = torch.zeros(shape)
    rule = UPDATE_RULES[update]
    state = {name: torch.zeros(shape) for name in rule.state_names}
    energies = (torch.zeros(1, 2 * chunk), torch.zeros(1, 2 * chunk))
    tensors = [LocalTensor(parameter, torch.zeros(4, chunk * chunk), state, energies=energies)]
    verdict = torch.zeros(1, dtype=torch.int32)
    step = FusedStack(stack, tensors, Scratch(), verdict)
    group = GroupStep(0.9, 1.0, rule, Hyper(1e-3, 1, (0.9, 0.99), 1e-8), 0.1, chunk, balance)
    payloads_RB = torch.zeros(num_replicas, bucket.payload_bytes, dtype=torch.uint8)
    findings_RW = torch.zeros(num_replicas, 10, dtype=torch.int64)
    found: dict[str, Launch] = {}

    def catch(kernel: JITFunction, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        found[kernel.__name__ + " that undoes" * bool(options.get("UNDOES"))] = (kernel, arguments, options)

    with mock.patch.object(JITFunction, "run", catch), torch.no_grad():
        step.encode_(group, payloads_RB[0])
        step.undo_(group, payloads_RB[0])
        step.apply_(group, payloads_RB, Decoding())
        inspect_(payloads_RB, [(stack.codec, stack.offset_bytes, stack.num_chunks)], findings_RW)
        judge_(payloads_RB, 0, findings_RW, verdict)
    return list(found.values())


def compiled(launch: Launch) -> dict[str, Any]:
    """Registers, stack bytes (spilled registers) and shared memory."""
    kernel, arguments, options = launch
    names = [parameter.name for parameter in kernel.params]
    given = {**dict(zip(names, arguments, strict=False)), **options}
    constants = {p.name: given[p.name] for p in kernel.params if p.is_constexpr}
    signature = {name: "constexpr" if name in constants else type_of(given[name]) for name in names}
    aligned = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(names) if signature[name].startswith("*")}
    source = ASTSource(kernel, signature, constants, aligned)
    settings = {name: options[name] for name in OPTIONS if name in options}
    binary = triton.compile(source, target=HOPPER, options=settings)
    used = {name: int(number) for name, number in re.findall(r"(REG|STACK|SHARED):(\d+)", resources(binary.asm["cubin"]))}
    return {
        "kernel": kernel.__name__,
        "registers": used["REG"],
        "stack_bytes": used["STACK"],
        "shared": binary.metadata.shared,
    }


def type_of(value: Any) -> str:
    """Triton's name for the type of an argument."""
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def resources(cubin: bytes) -> str:
    """What NVIDIA's tool, which triton brings along, says of a binary."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    edge, kept, codec, update_rule, replicas, *decay = sys.argv[1:]
    for each in launches(int(edge), int(kept), codec, update_rule, int(replicas), *map(float, decay)):
        print(json.dumps(compiled(each)))
