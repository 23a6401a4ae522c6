"""GPT-2, the Vision Transformer and the LSTM give the logits of PyTorch's at the same parameters.

Needs torch and transformers (5 or later), which the library itself does not. Nothing is downloaded:
the parameters are drawn at random, biases and normalisations included.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from models.gpt2 import SIZES as GPT2_SIZES
from models.vit import SIZES as VIT_SIZES

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5")
pytestmark = pytest.mark.slow

TOLERANCE = 1e-4  # of the largest logit: float32 sums in another order


def shaken(net, deviation):
    """(net, its parameters by name), in evaluation mode, after noise on every parameter."""
    torch.manual_seed(0)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(deviation * torch.randn_like(p))
    return net.eval(), {name: p.detach().numpy() for name, p in net.named_parameters()}


def logits_of(net, x):
    with torch.no_grad():
        return net(torch.as_tensor(x)).logits.numpy()


def assert_same(model, params, x, expected):
    assert jax.tree.map(np.shape, params) == jax.tree.map(
        lambda p: p.shape, jax.eval_shape(model.init, jax.random.key(0))
    )
    found = np.asarray(jax.jit(model.predict)(jax.tree.map(jnp.asarray, params), x))
    assert np.std(expected) > 0.01
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


def count(params):
    return sum(p.size for p in jax.tree.leaves(params))


def norm(p, name):
    return {"scale": p[f"{name}.weight"], "bias": p[f"{name}.bias"]}


def linear(p, name):  # torch keeps a matrix as [outputs, inputs]
    return {"kernel": p[f"{name}.weight"].T, "bias": p[f"{name}.bias"]}


def convolution(p, name):  # as the published GPT-2 keeps its matrices: [inputs, outputs]
    return {"kernel": p[f"{name}.weight"], "bias": p[f"{name}.bias"]}


def gpt2_params(p, depth):
    p = {name.removeprefix("transformer."): value for name, value in p.items()}
    params = {"tokens": p["wte.weight"], "positions": p["wpe.weight"], "norm": norm(p, "ln_f")}
    for k in range(depth):
        params[f"block{k}"] = {
            "norm1": norm(p, f"h.{k}.ln_1"),
            "attention": {
                "qkv": convolution(p, f"h.{k}.attn.c_attn"),
                "project": convolution(p, f"h.{k}.attn.c_proj"),
            },
            "norm2": norm(p, f"h.{k}.ln_2"),
            "dense1": convolution(p, f"h.{k}.mlp.c_fc"),
            "dense2": convolution(p, f"h.{k}.mlp.c_proj"),
        }
    return params


GPT2 = {
    # (vocabulary, context, sizes, noise, parameters)
    "a few": (50, 12, {"width": 24, "depth": 3, "heads": 4}, 0.2, None),
    "tiny": (1000, 64, GPT2_SIZES["tiny"], 0.1, None),
    "published": (50257, 1024, GPT2_SIZES["small"], 0.02, 124_439_808),
}


@pytest.mark.parametrize("name", GPT2)
def test_gpt2_gives_the_logits_of_transformers(name):
    vocab_size, context, sizes, noise, size = GPT2[name]
    net, p = shaken(
        transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=vocab_size, n_positions=context, n_embd=sizes["width"],
                n_layer=sizes["depth"], n_head=sizes["heads"], bos_token_id=0, eos_token_id=0,
            )
        ),
        noise,
    )  # fmt: skip
    params = gpt2_params(p, sizes["depth"])
    assert size is None or count(params) == size
    x = np.random.default_rng(0).integers(vocab_size, size=(2, min(context, 100)))
    model = models.gpt2(vocab_size=vocab_size, context=context, **sizes)
    assert_same(model, params, x, logits_of(net, x))


def vit_params(p, sizes):
    p = {name.removeprefix("vit."): value for name, value in p.items()}
    width, heads, embed = sizes["width"], sizes["heads"], "embeddings.patch_embeddings.projection"
    params = {
        "class_token": p["embeddings.cls_token"],
        "positions": p["embeddings.position_embeddings"],
        # a convolution [outputs, channels, rows, columns] over patches [rows, columns, channels]
        "embed": {
            "kernel": p[f"{embed}.weight"].transpose(2, 3, 1, 0).reshape(-1, width),
            "bias": p[f"{embed}.bias"],
        },
        "norm": norm(p, "layernorm"),
        "dense": linear(p, "classifier"),
    }
    for k in range(sizes["depth"]):
        layer = f"layers.{k}"
        attention = {}
        for ours, theirs in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj")):
            found = linear(p, f"{layer}.attention.{theirs}")
            attention[ours] = {
                "kernel": found["kernel"].reshape(width, heads, -1),
                "bias": found["bias"].reshape(heads, -1),
            }
        out = linear(p, f"{layer}.attention.o_proj")
        attention["out"] = {
            "kernel": out["kernel"].reshape(heads, -1, width), "bias": out["bias"],
        }  # fmt: skip
        params[f"block{k}"] = {
            "norm1": norm(p, f"{layer}.layernorm_before"),
            "attention": attention,
            "norm2": norm(p, f"{layer}.layernorm_after"),
            "dense1": linear(p, f"{layer}.mlp.fc1"),
            "dense2": linear(p, f"{layer}.mlp.fc2"),
        }
    return params


VIT = {
    # (side, classes, sizes, noise, gelu, parameters)
    "a few": (8, 5, {"width": 24, "depth": 3, "heads": 4, "mlp_ratio": 2, "patch": 4}, 0.2,
              "exact", None),
    "a few, tanh": (8, 5, {"width": 24, "depth": 3, "heads": 4, "mlp_ratio": 2, "patch": 4}, 0.2,
                    "tanh", None),
    "published, base": (224, 1000, VIT_SIZES["base"], 0.02, "exact", 86_567_656),
}  # fmt: skip


@pytest.mark.parametrize("name", VIT)
def test_vit_gives_the_logits_of_transformers(name):
    side, classes, sizes, noise, gelu, size = VIT[name]
    net, p = shaken(
        transformers.ViTForImageClassification(
            transformers.ViTConfig(
                image_size=side, patch_size=sizes["patch"], hidden_size=sizes["width"],
                num_hidden_layers=sizes["depth"], num_attention_heads=sizes["heads"],
                intermediate_size=sizes["mlp_ratio"] * sizes["width"], num_labels=classes,
                hidden_act={"exact": "gelu", "tanh": "gelu_new"}[gelu], layer_norm_eps=1e-6,
            )
        ),
        noise,
    )  # fmt: skip
    params = vit_params(p, sizes)
    assert size is None or count(params) == size
    x = np.float32(np.random.default_rng(0).standard_normal((2, side, side, 3)))
    model = models.vit(
        image_shape=(side, side, 3), num_classes=classes, pool="class", gelu=gelu, **sizes
    )
    assert_same(model, params, x, logits_of(net, x.transpose(0, 3, 1, 2)))


@pytest.mark.parametrize("vocab_size,width,depth", [(50, 8, 1), (50, 12, 3), (33278, 32, 2)])
def test_lstm_gives_the_logits_of_torch(vocab_size, width, depth):
    net, p = shaken(torch.nn.LSTM(width, width, depth, batch_first=True), 0.3)
    rng = np.random.default_rng(0)
    tokens = np.float32(rng.standard_normal((vocab_size, width)))
    params = {"tokens": tokens} | {
        f"layer{k}": {
            "input": p[f"weight_ih_l{k}"].T,
            "recurrent": p[f"weight_hh_l{k}"].T,
            "bias_input": p[f"bias_ih_l{k}"],
            "bias_recurrent": p[f"bias_hh_l{k}"],
        }
        for k in range(depth)
    }
    x = rng.integers(vocab_size, size=(3, 35))
    with torch.no_grad():
        states, _ = net(torch.as_tensor(tokens[x]))
        expected = torch.nn.functional.linear(states, torch.as_tensor(tokens)).numpy()
    model = models.lstm(vocab_size=vocab_size, width=width, depth=depth)
    assert_same(model, params, x, expected)
