"""The errors that newcomers to Neuron devices meet: the table of docs/errors.md and of `doctor --log`."""

from __future__ import annotations

from dataclasses import dataclass

PLAN = "python main.py --role plan --instance {instance} --target_model DIR --draft_model DIR"
DOCTOR = "python main.py --role doctor"
ISSUES = "https://github.com/{repository}/issues/{number}"
COMPILER_CODES = "https://awsdocs-neuron.readthedocs-hosted.com/en/latest/compiler/error-codes/index.html"
RUNTIME_CODES = "https://awsdocs-neuron.readthedocs-hosted.com/en/latest/neuron-runtime/api/nrt_status.html"
EKS = "https://docs.aws.amazon.com/eks/latest/userguide/device-management-neuron.html"


@dataclass(frozen=True, slots=True)
class KnownError:
    """An error: text of which a line of a log has one part, in lower case; why it occurs; what to type next.

    `where` says who reports it: an address, or Tandem itself.
    """

    name: str
    signs: tuple[str, ...]
    symptom: str
    cause: str
    command: str
    where: str


def _issue(repository: str, number: int) -> str:
    return ISSUES.format(repository=repository, number=number)


KNOWN_ERRORS = (
    KnownError(
        "compiler-killed",
        ("neuronx-cc failed with -9", "compile command returned: -9", "[f137] neuronx-cc was forcibly killed"),
        "neuronx-cc failed with -9; [F137] neuronx-cc was forcibly killed",
        "The host's memory ran out while a graph was compiled, and the kernel ended the compiler. Compile fewer "
        "graphs at "
        "once, or a shorter --sequence_length, or on a larger instance; plan counts host memory",
        PLAN.format(instance="trn2.3xlarge"),
        _issue("aws-neuron/aws-neuron-sdk", 431),
    ),
    KnownError(
        "compiler-70",
        ("neuronx-cc failed with 70", "returned non-zero exit status 70"),
        "neuronx-cc failed with 70; returned non-zero exit status 70",
        "The compiler gave up on a graph; the lines above say why ([F137] among them: host memory). On Trn1, "
        "fused pairs "
        "failed with more than one sequence: compile with --batch 1",
        "python main.py --role compile --backend nxdi --compile_for fused --target_model DIR --draft_model DIR "
        "--tp_degree 2 "
        "--batch 1 --sequence_length 128",
        _issue("aws-neuron/aws-neuron-sdk", 1143),
    ),
    KnownError(
        "compiler-unhandled",
        ("[ncc_inla001]",),
        "[NCC_INLA001] Unhandled exception with message",
        "A fault of the compiler itself, which depends on its version. Use the image whose SDK the recipe names, "
        "and compare "
        "versions; doctor lists them",
        DOCTOR,
        _issue("vllm-project/vllm-neuron", 16),
    ),
    KnownError(
        "tile-too-large",
        ("allocated memory out of bound",),
        "Allocated memory out of bound",
        "An operand does not fit the core's on-chip memory, as with long prompts in one piece. Compile shorter prompts "
        "(--prefill_chunk; on NxD Inference max_context_length and its buckets), fewer rows, or a higher --tp_degree",
        "python main.py --role compile --device neuron --target_model DIR --draft_model DIR --prefill_chunk 64 "
        "--batch 1",
        _issue("aws-neuron/aws-neuron-sdk", 1118),
    ),
    KnownError(
        "too-many-instructions",
        ("number of instructions generated exceeds the limit", "ncc_ebvf030", "ncc_evrf007", "ncc_extp004"),
        "NCC_EBVF030, NCC_EVRF007, NCC_EXTP004: The number of instructions generated exceeds the limit",
        "A graph is above the compiler's limit, most often the fused one. Serve target and draft apart, or use "
        "more cores",
        "python main.py --role compile --device neuron --compile_for target,draft --target_model DIR --draft_model DIR",
        COMPILER_CODES,
    ),
    KnownError(
        "compiler-device-memory",
        ("ncc_eoom001", "ncc_eoom002"),
        "NCC_EOOM001, NCC_EOOM002: the combined memory needed exceeds the high-bandwidth memory limit",
        "Weights, cache and buffers of one core are above its memory. Use more cores, fewer rows or a shorter "
        "length; plan "
        "shows what fits",
        PLAN.format(instance="trn2.3xlarge"),
        COMPILER_CODES,
    ),
    KnownError(
        "logical-cores",
        ("ncc_earg001", "unsupported logical neuron core"),
        "NCC_EARG001: Unsupported Logical Neuron Core (LNC) configuration",
        "The compiler was asked for logical cores that the chip does not have: Trn1 and Inf2 have LNC 1 alone, "
        "Trn2 and Trn3 "
        "1 and 2. Compiler and runtime must agree: set NEURON_RT_VIRTUAL_CORE_SIZE and logical_nc_config alike, "
        "or neither",
        DOCTOR,
        COMPILER_CODES,
    ),
    KnownError(
        "device-memory",
        ("failed to alloc device memory", "nrt_tensor_allocate status=4"),
        'Failed to alloc DEVICE memory; nrt_tensor_allocate status=4 message="Allocation Failure"',
        "The core's memory ran out while weights or graphs were loaded, of this process or another on the same cores",
        PLAN.format(instance="trn2.3xlarge"),
        _issue("aws-neuron/aws-neuron-sdk", 1014),
    ),
    KnownError(
        "cores-held",
        ("core(s) not available - requested",),
        "Logical Neuron Core(s) not available - Requested:2 Available:0",
        "Another process holds the cores until it ends: an old server, or a notebook. doctor names the "
        "processes; give each "
        "process its own cores with NEURON_RT_VISIBLE_CORES",
        DOCTOR,
        _issue("aws-neuron/aws-neuron-sdk", 1338),
    ),
    KnownError(
        "no-device",
        (
            "no neuron device available",
            "cannot determine the number of available neuroncores",
            "there is no /dev/neuron*",
        ),
        "No neuron device available; cannot determine the number of available NeuronCores; there is no /dev/neuron*",
        "The driver is not loaded, or the container was not given the devices (docker run --device=/dev/neuron0)",
        "ls -l /dev/neuron0 && " + DOCTOR,
        _issue("aws-neuron/aws-neuron-samples", 44),
    ),
    KnownError(
        "no-runtime-library",
        ("libnrt.so.1: cannot open shared object file",),
        "libnrt.so.1: cannot open shared object file",
        "The runtime's library is not installed, or not on the library path",
        "export LD_LIBRARY_PATH=/opt/aws/neuron/lib:$LD_LIBRARY_PATH",
        "nrtpy's page on troubleshooting",
    ),
    KnownError(
        "neff-version",
        ("nrt_unsupported_neff_version", "nerr_unsupported_version"),
        "NRT_UNSUPPORTED_NEFF_VERSION",
        "A graph was compiled by a newer SDK than this runtime's, or for another chip. Compile where the servers "
        "run, into "
        "a new --compiled_dir",
        DOCTOR,
        RUNTIME_CODES,
    ),
    KnownError(
        "topology",
        ("unsupported topology. supported number of neuron cores",),
        "nrt_load_collectives: Unsupported topology. Supported number of Neuron Cores is 1, 2, 8, 16 or a "
        "multiple of 32",
        "The runtime does not connect that number of cores: choose another --tp_degree; plan lists those that "
        "the chip has",
        PLAN.format(instance="trn1.32xlarge"),
        _issue("huggingface/optimum-neuron", 619),
    ),
    KnownError(
        "numerical-error",
        ("status=1003", "nrt_exec_completed_with_num_err"),
        "Failed to execute the model status=1003 message=Numerical Error",
        "A step computed NaN. With FP8 weights: the checkpoint has values beyond Neuron's range, or "
        "XLA_HANDLE_SPECIAL_SCALAR "
        "and UNSAFE_FP8FNCAST were not set (Tandem sets both); otherwise SDKs before 2.24 had it with several rows",
        "python main.py --role convert --convert fp8 --model DIR --output NEURON_DIR",
        _issue("aws-neuron/aws-neuron-sdk", 1148),
    ),
    KnownError(
        "draft-scales",
        ("cannot find draft_model.",),
        "Cannot find draft_model.layers.1.mlp.gate_proj.scale in state_dict",
        "NxD Inference was told to quantise a fused draft whose checkpoint has no scales. Tandem lists the "
        "draft's modules by "
        "itself and refuses the rest before compiling: compile with Tandem, or write "
        "draft_model_modules_to_not_convert",
        "python main.py --role compile --backend nxdi --compile_for fused --target_model DIR --draft_model DIR "
        "--tp_degree 64",
        "NxD Inference's own Python, run here",
    ),
    KnownError(
        "placeholder",
        ("is a placeholder from pypi", "are placeholders from pypi"),
        "torch-neuronx 1.0 is a placeholder from PyPI",
        "pip took the empty packages that PyPI has under AWS's names",
        "python -m pip install --extra-index-url https://pip.repos.neuron.amazonaws.com -r requirements-neuron.txt",
        "Tandem",
    ),
    KnownError(
        "two-stacks",
        (
            "is the xla package; torchneuron",
            "this environment holds torchneuron; nxd inference needs the xla",
            "no module named 'torch_xla'",
        ),
        "torch-neuronx ... is the XLA package; this environment holds TorchNeuron; No module named 'torch_xla'",
        "TorchNeuron and the XLA packages share the name torch-neuronx: an environment can hold one of them. Use "
        "the image's "
        "environment for what you start, or make a new one",
        "python -m venv neuron && neuron/bin/pip install -r requirements-neuron.txt",
        "Tandem",
    ),
    KnownError(
        "claim-source",
        ("must specify one of: `resourceclaimname`, `resourceclaimtemplatename`",),
        "must specify one of: `resourceClaimName`, `resourceClaimTemplateName`",
        "The manifest is of an old DRA version, which wrote resourceClaims[].source; the API drops that field",
        "kubectl explain pod.spec.resourceClaims",
        _issue("kubernetes/kubernetes", 131877),
    ),
    KnownError(
        "claim-not-met",
        ("cannot allocate all claims",),
        "0/1 nodes are available: 1 cannot allocate all claims",
        "No node has the free devices that the claim asks for: all are taken, the DRA driver is not on the node, "
        "or a CEL "
        "expression matches none",
        "kubectl get resourceslices -o yaml",
        EKS,
    ),
    KnownError(
        "device-plugin",
        ("insufficient aws.amazon.com/neuron",),
        "Insufficient aws.amazon.com/neuron",
        "The pod asks the device plugin, and the node has none free or has the DRA driver instead. The two "
        "exclude each "
        "other on a node: install the driver alone, and claim devices as deploy/k8s does",
        "helm upgrade --install neuron-helm-chart oci://public.ecr.aws/neuron/neuron-helm-chart "
        "--set devicePlugin.enabled=false --set npd.enabled=false --set draDriver.enabled=true",
        EKS,
    ),
)
