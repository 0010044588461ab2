"""Published models: what config.json says of each, and the tensors of its checkpoint, as transformers (or the model's own code)
names them. Numbers are those of the published files; only what llama.cpp's converter reads is kept."""


class Checkpoint(dict):
    """Names and shapes."""

    def linear(self, name, rows, columns, bias=False):
        self[name + ".weight"] = (rows, columns)
        if bias:
            self[name + ".bias"] = (rows,)

    def norm(self, name, n, bias=False):
        self[name + ".weight"] = (n,)
        if bias:
            self[name + ".bias"] = (n,)

    def mlp(self, p, d, ff, gate="gate_proj", up="up_proj", down="down_proj"):
        for part in filter(None, (gate, up)):
            self.linear(f"{p}.{part}", ff, d)
        self.linear(f"{p}.{down}", d, ff)


def sizes(c):
    d, n = c["hidden_size"], c["num_attention_heads"]
    return d, n, c.get("num_key_value_heads", n), c.get("head_dim") or d // n


def attention(t, p, c, bias=False, o_bias=False, norms=None, o="o_proj", gated=False, norm_names=("q_norm", "k_norm")):
    """Separate projections; `norms` is None, `head` or `all`."""
    d, n, kv, h = sizes(c)
    t.linear(f"{p}.q_proj", n * h * (2 if gated else 1), d, bias)
    t.linear(f"{p}.k_proj", kv * h, d, bias)
    t.linear(f"{p}.v_proj", kv * h, d, bias)
    t.linear(f"{p}.{o}", d, n * h, o_bias)
    if norms:
        t.norm(f"{p}.{norm_names[0]}", h if norms == "head" else n * h)
        t.norm(f"{p}.{norm_names[1]}", h if norms == "head" else kv * h)


def experts(t, p, n, d, ff, names=("gate_proj", "up_proj", "down_proj")):
    for e in range(n):
        t.mlp(f"{p}.{e}", d, ff, *names)


MIXTRAL = ("w1", "w3", "w2")
TWO_NORMS = ("input_layernorm", "post_attention_layernorm")
GEMMA_NORMS = TWO_NORMS + ("pre_feedforward_layernorm", "post_feedforward_layernorm")


def decoder(c, block, tied=None, model="model", embed="embed_tokens", norm="norm", head="lm_head", norms=TWO_NORMS, norm_bias=False):
    """A model of the usual names; `block(t, p, i)` adds the tensors of layer i."""
    t, d = Checkpoint(), c["hidden_size"]
    tied = c.get("tie_word_embeddings", False) if tied is None else tied
    t.linear(f"{model}.{embed}", c["vocab_size"], d)
    t.norm(f"{model}.{norm}", d, norm_bias)
    if not tied:
        t.linear(head, c["vocab_size"], d)
    for i in range(c["num_hidden_layers"]):
        p = f"{model}.layers.{i}"
        for name in norms:
            t.norm(f"{p}.{name}", d, norm_bias)
        block(t, p, i)
    return t


def plain(c, norms=TWO_NORMS, **kwargs):
    """Attention and a gated MLP in each layer."""
    def block(t, p, i):
        attention(t, f"{p}.self_attn", c, **kwargs)
        t.mlp(f"{p}.mlp", c["hidden_size"], c["intermediate_size"])
    return decoder(c, block, norms=norms)


def mixtral(c, bias=False):
    def block(t, p, i):
        attention(t, f"{p}.self_attn", c, bias, bias)
        t.linear(f"{p}.block_sparse_moe.gate", c["num_local_experts"], c["hidden_size"])
        experts(t, f"{p}.block_sparse_moe.experts", c["num_local_experts"], c["hidden_size"], c["intermediate_size"], MIXTRAL)
    return decoder(c, block, norm_bias=bias)


def phimoe(c):
    t = mixtral(c, True)
    t["lm_head.bias"] = (c["vocab_size"],)
    return t


def qwen2moe(c):
    def block(t, p, i):
        attention(t, f"{p}.self_attn", c, True)
        t.linear(f"{p}.mlp.gate", c["num_experts"], c["hidden_size"])
        experts(t, f"{p}.mlp.experts", c["num_experts"], c["hidden_size"], c["moe_intermediate_size"])
        t.mlp(f"{p}.mlp.shared_expert", c["hidden_size"], c["shared_expert_intermediate_size"])
        t.linear(f"{p}.mlp.shared_expert_gate", 1, c["hidden_size"])
    return decoder(c, block)


def qwen3moe(c):
    def block(t, p, i):
        attention(t, f"{p}.self_attn", c, norms="head")
        t.linear(f"{p}.mlp.gate", c["num_experts"], c["hidden_size"])
        experts(t, f"{p}.mlp.experts", c["num_experts"], c["hidden_size"], c["moe_intermediate_size"])
    return decoder(c, block)


def qwen3next(c):
    d, k, v = c["hidden_size"], c["linear_num_key_heads"], c["linear_num_value_heads"]
    k_dim, v_dim = k * c["linear_key_head_dim"], v * c["linear_value_head_dim"]

    def block(t, p, i):
        if i is None or (i + 1) % c["full_attention_interval"] == 0:
            attention(t, f"{p}.self_attn", c, norms="head", gated=True)
        else:
            q = f"{p}.linear_attn"
            t.linear(f"{q}.in_proj_qkvz", 2 * k_dim + 2 * v_dim, d)
            t.linear(f"{q}.in_proj_ba", 2 * v, d)
            t[f"{q}.conv1d.weight"] = (2 * k_dim + v_dim, 1, c["linear_conv_kernel_dim"])
            t[f"{q}.A_log"], t[f"{q}.dt_bias"] = (v,), (v,)
            t.norm(f"{q}.norm", c["linear_value_head_dim"])
            t.linear(f"{q}.out_proj", d, v_dim)
        t.linear(f"{p}.mlp.gate", c["num_experts"], d)
        experts(t, f"{p}.mlp.experts", c["num_experts"], d, c["moe_intermediate_size"])
        t.mlp(f"{p}.mlp.shared_expert", d, c["shared_expert_intermediate_size"])
        t.linear(f"{p}.mlp.shared_expert_gate", 1, d)
    t = decoder(c, block)
    t.linear("mtp.fc", d, 2 * d)
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden") + tuple(f"layers.0.{name}" for name in TWO_NORMS):
        t.norm(f"mtp.{name}", d)
    block(t, "mtp.layers.0", None)
    return t


def qwen35(c):
    c = c["text_config"]
    d, v = c["hidden_size"], c["linear_num_value_heads"]
    k_dim, v_dim = c["linear_num_key_heads"] * c["linear_key_head_dim"], v * c["linear_value_head_dim"]

    def block(t, p, i):
        if i is None or (i + 1) % c["full_attention_interval"] == 0:
            attention(t, f"{p}.self_attn", c, norms="head", gated=True)
        else:
            q = f"{p}.linear_attn"
            t.linear(f"{q}.in_proj_qkv", 2 * k_dim + v_dim, d)
            t.linear(f"{q}.in_proj_z", v_dim, d)
            t.linear(f"{q}.in_proj_b", v, d)
            t.linear(f"{q}.in_proj_a", v, d)
            t[f"{q}.conv1d.weight"] = (2 * k_dim + v_dim, 1, c["linear_conv_kernel_dim"])
            t[f"{q}.A_log"], t[f"{q}.dt_bias"] = (v,), (v,)
            t.norm(f"{q}.norm", c["linear_value_head_dim"])
            t.linear(f"{q}.out_proj", d, v_dim)
        if "num_experts" in c:
            n, ff = c["num_experts"], c["moe_intermediate_size"]
            t.linear(f"{p}.mlp.gate", n, d)
            if i is None:
                experts(t, f"{p}.mlp.experts", n, d, ff)
            else:
                t[f"{p}.mlp.experts.gate_up_proj"], t[f"{p}.mlp.experts.down_proj"] = (n, 2 * ff, d), (n, d, ff)
            t.mlp(f"{p}.mlp.shared_expert", d, c["shared_expert_intermediate_size"])
            t.linear(f"{p}.mlp.shared_expert_gate", 1, d)
        else:
            t.mlp(f"{p}.mlp", d, c["intermediate_size"])
    t = decoder(c, block, model="model.language_model")
    t.linear("mtp.fc", d, 2 * d)
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden") + tuple(f"layers.0.{name}" for name in TWO_NORMS):
        t.norm(f"mtp.{name}", d)
    block(t, "mtp.layers.0", None)
    return t


def gemma4(c):
    c = c["text_config"]
    d, layers, e = c["hidden_size"], c["num_hidden_layers"], c["hidden_size_per_layer_input"]
    m = "model.language_model"

    def block(t, p, i):
        q, is_full = f"{p}.self_attn", c["layer_types"][i] == "full_attention"
        h = c["global_head_dim"] if is_full else c["head_dim"]
        kv = (c["num_global_key_value_heads"] if is_full else None) or c["num_key_value_heads"]
        n = c["num_attention_heads"]
        t.linear(f"{q}.q_proj", n * h, d)
        t.linear(f"{q}.o_proj", d, n * h)
        t.norm(f"{q}.q_norm", h)
        t.linear(f"{q}.k_proj", kv * h, d)
        t.norm(f"{q}.k_norm", h)
        if not (is_full and c["attention_k_eq_v"]):
            t.linear(f"{q}.v_proj", kv * h, d)
        t[f"{p}.layer_scalar"] = (1,)
        t.mlp(f"{p}.mlp", d, c["intermediate_size"])
        if c["enable_moe_block"]:
            experts_of_layer, ff = c["num_experts"], c["moe_intermediate_size"]
            t.linear(f"{p}.router.proj", experts_of_layer, d)
            t[f"{p}.router.scale"], t[f"{p}.router.per_expert_scale"] = (d,), (experts_of_layer,)
            t[f"{p}.experts.gate_up_proj"] = (experts_of_layer, 2 * ff, d)
            t[f"{p}.experts.down_proj"] = (experts_of_layer, d, ff)
            for name in ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2"):
                t.norm(f"{p}.{name}", d)
        if e:
            t.linear(f"{p}.per_layer_input_gate", e, d)
            t.linear(f"{p}.per_layer_projection", d, e)
            t.norm(f"{p}.post_per_layer_input_norm", d)
    t = decoder(c, block, True, m, norms=GEMMA_NORMS)
    if e:
        t.linear(f"{m}.embed_tokens_per_layer", c["vocab_size_per_layer_input"], layers * e)
        t.linear(f"{m}.per_layer_model_projection", layers * e, d)
        t.norm(f"{m}.per_layer_projection_norm", e)
    return t


def gemma3n(c):
    c = c["text_config"]
    d, n, e = c["hidden_size"], c["num_hidden_layers"], c["hidden_size_per_layer_input"]
    m = "model.language_model"

    def block(t, p, i):
        attention(t, f"{p}.self_attn", c, norms="head")
        t.mlp(f"{p}.mlp", d, c["intermediate_size"][i])
        t[f"{p}.altup.correct_output_scale"] = (d,)
        t.linear(f"{p}.altup.correction_coefs", 4, 4)
        t.linear(f"{p}.altup.prediction_coefs", 16, 4)
        t.linear(f"{p}.altup.modality_router", 4, d)
        t.norm(f"{p}.altup.router_norm", d)
        t.linear(f"{p}.laurel.linear_left", c["laurel_rank"], d)
        t.linear(f"{p}.laurel.linear_right", d, c["laurel_rank"])
        t.norm(f"{p}.laurel.post_laurel_norm", d)
        t.linear(f"{p}.per_layer_input_gate", e, d)
        t.linear(f"{p}.per_layer_projection", d, e)
        t.norm(f"{p}.post_per_layer_input_norm", d)
    t = decoder(c, block, True, m, norms=GEMMA_NORMS)
    t.linear(f"{m}.embed_tokens_per_layer", c["vocab_size_per_layer_input"], n * e)
    t.linear(f"{m}.per_layer_model_projection", n * e, d)
    t.norm(f"{m}.per_layer_projection_norm", e)
    for i in range(3):
        t.linear(f"{m}.altup_projections.{i}", d, d)
        t.linear(f"{m}.altup_unembed_projections.{i}", d, d)
    return t


def embedding_gemma(c):
    return {name.removeprefix("model."): shape for name, shape in gemma_text(c).items()}


def gemma_text(c):
    def block(t, p, i):
        attention(t, f"{p}.self_attn", c, norms="head")
        t.mlp(f"{p}.mlp", c["hidden_size"], c["intermediate_size"])
    return decoder(c, block, True, norms=GEMMA_NORMS)


def gpt_oss(c):
    d, n, ff = c["hidden_size"], c["num_local_experts"], c["intermediate_size"]

    def block(t, p, i):
        attention(t, f"{p}.self_attn", c, True, True)
        t[f"{p}.self_attn.sinks"] = (c["num_attention_heads"],)
        t.linear(f"{p}.mlp.router", n, d, True)
        t[f"{p}.mlp.experts.gate_up_proj"], t[f"{p}.mlp.experts.gate_up_proj_bias"] = (n, d, 2 * ff), (n, 2 * ff)
        t[f"{p}.mlp.experts.down_proj"], t[f"{p}.mlp.experts.down_proj_bias"] = (n, ff, d), (n, d)
    return decoder(c, block)


def latent_attention(t, p, c):
    d, n, rank = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    nope, rope, v = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    if c.get("q_lora_rank"):
        t.linear(f"{p}.q_a_proj", c["q_lora_rank"], d)
        t.norm(f"{p}.q_a_layernorm", c["q_lora_rank"])
        t.linear(f"{p}.q_b_proj", n * (nope + rope), c["q_lora_rank"])
    else:
        t.linear(f"{p}.q_proj", n * (nope + rope), d)
    t.linear(f"{p}.kv_a_proj_with_mqa", rank + rope, d)
    t.norm(f"{p}.kv_a_layernorm", rank)
    t.linear(f"{p}.kv_b_proj", n * (nope + v), rank)
    t.linear(f"{p}.o_proj", d, n * v)


def shared_experts(t, p, c, has_bias, n=None):
    """DeepSeek's experts, and its dense leading layers."""
    d, n, moe = c["hidden_size"], n or c["n_routed_experts"], c["moe_intermediate_size"]
    t.linear(f"{p}.gate", n, d)
    if has_bias:
        t[f"{p}.gate.e_score_correction_bias"] = (n,)
    experts(t, f"{p}.experts", n, d, moe)
    if c.get("n_shared_experts"):
        t.mlp(f"{p}.shared_experts", d, moe * c["n_shared_experts"])


def mtp_layer(t, p, c):
    d = c["hidden_size"]
    t.linear(f"{p}.eh_proj", d, 2 * d)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        t.norm(f"{p}.{name}", d)
    t.linear(f"{p}.embed_tokens", c["vocab_size"], d)
    t.linear(f"{p}.shared_head.head", c["vocab_size"], d)


def deepseek(c, indexer=False, has_bias=True):
    d, layers = c["hidden_size"], c["num_hidden_layers"]

    def block(t, p, i):
        latent_attention(t, f"{p}.self_attn", c)
        if indexer:
            q, n, h = f"{p}.self_attn.indexer", c["index_n_heads"], c["index_head_dim"]
            t.linear(f"{q}.wq_b", n * h, c["q_lora_rank"])
            t.linear(f"{q}.wk", h, d)
            t.norm(f"{q}.k_norm", h, True)
            t.linear(f"{q}.weights_proj", n, d)
        if i < c["first_k_dense_replace"]:
            t.mlp(f"{p}.mlp", d, c["intermediate_size"])
        else:
            shared_experts(t, f"{p}.mlp", c, has_bias)
        if i >= layers:
            mtp_layer(t, p, c)
    all_layers = layers + c.get("num_nextn_predict_layers", 0)
    return decoder({**c, "num_hidden_layers": all_layers}, block)


def glm4moe(c):
    layers = c["num_hidden_layers"]

    def block(t, p, i):
        attention(t, f"{p}.self_attn", c, True, norms="head" if c["use_qk_norm"] else None)
        if i < c["first_k_dense_replace"]:
            t.mlp(f"{p}.mlp", c["hidden_size"], c["intermediate_size"])
        else:
            shared_experts(t, f"{p}.mlp", c, True)
        if i >= layers:
            mtp_layer(t, p, c)
    return decoder({**c, "num_hidden_layers": layers + 1}, block)


def glm4(c):
    def block(t, p, i):
        attention(t, f"{p}.self_attn", c)
        t.linear(f"{p}.mlp.gate_up_proj", 2 * c["intermediate_size"], c["hidden_size"])
        t.linear(f"{p}.mlp.down_proj", c["hidden_size"], c["intermediate_size"])
    return decoder(c, block, norms=TWO_NORMS + ("post_self_attn_layernorm", "post_mlp_layernorm"))


def kimi_linear(c):
    d, linear = c["hidden_size"], c["linear_attn_config"]
    n, h = linear["num_heads"], linear["head_dim"]

    def block(t, p, i):
        q = f"{p}.self_attn"
        if i + 1 in linear["full_attn_layers"]:
            latent_attention(t, q, c)
        else:
            for part in "qkv":
                t.linear(f"{q}.{part}_proj", n * h, d)
                t[f"{q}.{part}_conv1d.weight"] = (n * h, 1, linear["short_conv_kernel_size"])
            t[f"{q}.A_log"], t[f"{q}.dt_bias"] = (1, 1, n, 1), (n * h,)
            for part in "fg":
                t.linear(f"{q}.{part}_a_proj", h, d)
                t.linear(f"{q}.{part}_b_proj", n * h, h)
            t.linear(f"{q}.b_proj", n, d)
            t.norm(f"{q}.o_norm", h)
            t.linear(f"{q}.o_proj", d, n * h)
        if i < c["first_k_dense_replace"]:
            t.mlp(f"{p}.mlp", d, c["intermediate_size"])
        else:
            m = f"{p}.block_sparse_moe"
            t.linear(f"{m}.gate", c["num_experts"], d)
            t[f"{m}.gate.e_score_correction_bias"] = (c["num_experts"],)
            experts(t, f"{m}.experts", c["num_experts"], d, c["moe_intermediate_size"], MIXTRAL)
            t.mlp(f"{m}.shared_experts", d, c["moe_intermediate_size"] * c["num_shared_experts"])
    return decoder(c, block)


def minimax_m2(c):
    def block(t, p, i):
        attention(t, f"{p}.self_attn", c, norms="all")
        m = f"{p}.block_sparse_moe"
        t.linear(f"{m}.gate", c["num_local_experts"], c["hidden_size"])
        t[f"{m}.e_score_correction_bias"] = (c["num_local_experts"],)
        experts(t, f"{m}.experts", c["num_local_experts"], c["hidden_size"], c["intermediate_size"], MIXTRAL)
    return decoder(c, block)


def llama4(c):
    c = c["text_config"]
    d, n, ff = c["hidden_size"], c["num_local_experts"], c["intermediate_size"]

    def block(t, p, i):
        attention(t, f"{p}.self_attn", c)
        m = f"{p}.feed_forward"
        t.linear(f"{m}.router", n, d)
        t[f"{m}.experts.gate_up_proj"], t[f"{m}.experts.down_proj"] = (n, d, 2 * ff), (n, ff, d)
        t.mlp(f"{m}.shared_expert", d, ff)
    return decoder(c, block, model="language_model.model", head="language_model.lm_head")


def phi2(c):
    def block(t, p, i):
        attention(t, f"{p}.self_attn", c, True, True, o="dense")
        t.linear(f"{p}.mlp.fc1", c["intermediate_size"], c["hidden_size"], True)
        t.linear(f"{p}.mlp.fc2", c["hidden_size"], c["intermediate_size"], True)
    t = decoder(c, block, norm="final_layernorm", norms=("input_layernorm",), norm_bias=True)
    t["lm_head.bias"] = (c["vocab_size"],)
    return t


def phi3(c):
    def block(t, p, i):
        d, n, kv, h = sizes(c)
        t.linear(f"{p}.self_attn.qkv_proj", (n + 2 * kv) * h, d)
        t.linear(f"{p}.self_attn.o_proj", d, n * h)
        t.linear(f"{p}.mlp.gate_up_proj", 2 * c["intermediate_size"], d)
        t.linear(f"{p}.mlp.down_proj", d, c["intermediate_size"])
    return decoder(c, block)


def mamba2_mixer(t, p, d, inner, groups, state, heads, conv, gate_norm=True):
    channels = inner + 2 * groups * state
    t.linear(f"{p}.in_proj", 2 * inner + 2 * groups * state + heads, d)
    t[f"{p}.conv1d.weight"], t[f"{p}.conv1d.bias"] = (channels, 1, conv), (channels,)
    for part in ("A_log", "D", "dt_bias"):
        t[f"{p}.{part}"] = (heads,)
    if gate_norm:
        t.norm(f"{p}.norm", inner)
    t.linear(f"{p}.out_proj", d, inner)


def granite_hybrid(c):
    d, n, ff = c["hidden_size"], c["num_local_experts"], c["intermediate_size"]

    def block(t, p, i):
        if c["layer_types"][i] == "attention":
            attention(t, f"{p}.self_attn", c)
        else:
            heads = c["mamba_n_heads"]
            inner = heads * c["mamba_d_head"]
            mamba2_mixer(t, f"{p}.mamba", d, inner, c["mamba_n_groups"], c["mamba_d_state"], heads, c["mamba_d_conv"])
        t.linear(f"{p}.block_sparse_moe.router.layer", n, d)
        t[f"{p}.block_sparse_moe.input_linear.weight"] = (n, 2 * ff, d)
        t[f"{p}.block_sparse_moe.output_linear.weight"] = (n, d, ff)
        t.linear(f"{p}.shared_mlp.input_linear", 2 * c["shared_intermediate_size"], d)
        t.linear(f"{p}.shared_mlp.output_linear", d, c["shared_intermediate_size"])
    return decoder(c, block)


def nemotron_h(c):
    d = c["hidden_size"]

    def block(t, p, i):
        kind, q = c["hybrid_override_pattern"][i], f"{p}.mixer"
        if kind == "M":
            heads = c["mamba_num_heads"]
            mamba2_mixer(t, q, d, heads * c["mamba_head_dim"], c["n_groups"], c["ssm_state_size"], heads, c["conv_kernel"])
        elif kind == "*":
            attention(t, q, c)
        else:
            t.mlp(q, d, c["intermediate_size"], None)
    return decoder(c, block, model="backbone", embed="embeddings", norm="norm_f", norms=("norm",))


def lfm2(c):
    d = c["hidden_size"]

    def block(t, p, i):
        if c["layer_types"][i] == "conv":
            t[f"{p}.conv.conv.weight"] = (d, 1, c["conv_L_cache"])
            t.linear(f"{p}.conv.in_proj", 3 * d, d)
            t.linear(f"{p}.conv.out_proj", d, d)
        else:
            attention(t, f"{p}.self_attn", c, norms="head", o="out_proj", norm_names=("q_layernorm", "k_layernorm"))
        m = f"{p}.feed_forward"
        if i >= c.get("num_dense_layers", 99):
            t.linear(f"{m}.gate", c["num_experts"], d)
            t[f"{m}.expert_bias"] = (c["num_experts"],)
            experts(t, f"{m}.experts", c["num_experts"], d, c["moe_intermediate_size"], MIXTRAL)
        else:
            t.mlp(m, d, c["intermediate_size"], *MIXTRAL)
    return decoder(c, block, True, norm="embedding_norm", norms=("operator_norm", "ffn_norm"))


def mamba1_mixer(t, p, d, inner, state, rank, conv, norms=()):
    t.linear(f"{p}.in_proj", 2 * inner, d)
    t[f"{p}.conv1d.weight"], t[f"{p}.conv1d.bias"] = (inner, 1, conv), (inner,)
    t.linear(f"{p}.x_proj", rank + 2 * state, inner)
    t.linear(f"{p}.dt_proj", inner, rank, True)
    t[f"{p}.A_log"], t[f"{p}.D"] = (inner, state), (inner,)
    t.linear(f"{p}.out_proj", d, inner)
    for name, n in zip(norms, (rank, state, state)):
        t.norm(f"{p}.{name}", n)


def mamba(c):
    def block(t, p, i):
        mamba1_mixer(t, f"{p}.mixer", c["hidden_size"], c["intermediate_size"], c["state_size"], c["time_step_rank"], c["conv_kernel"])
    return decoder(c, block, True, "backbone", "embeddings", "norm_f", norms=("norm",))


def jamba(c):
    d = c["hidden_size"]

    def block(t, p, i):
        if i % c["attn_layer_period"] == c["attn_layer_offset"]:
            attention(t, f"{p}.self_attn", c)
        else:
            norms = ("dt_layernorm", "b_layernorm", "c_layernorm")
            inner = d * c["mamba_expand"]
            mamba1_mixer(t, f"{p}.mamba", d, inner, c["mamba_d_state"], c["mamba_dt_rank"], c["mamba_d_conv"], norms)
        m = f"{p}.feed_forward"
        if i % c["expert_layer_period"] == c["expert_layer_offset"]:
            t.linear(f"{m}.router", c["num_experts"], d)
            experts(t, f"{m}.experts", c["num_experts"], d, c["intermediate_size"])
        else:
            t.mlp(m, d, c["intermediate_size"])
    return decoder(c, block, norm="final_layernorm", norms=("input_layernorm", "pre_ff_layernorm"))


def bert(c):
    t, d = Checkpoint(), c["hidden_size"]
    t.linear("embeddings.word_embeddings", c["vocab_size"], d)
    t.linear("embeddings.position_embeddings", c["max_position_embeddings"], d)
    t.linear("embeddings.token_type_embeddings", 2, d)
    t.norm("embeddings.LayerNorm", d, True)
    for i in range(c["num_hidden_layers"]):
        p = f"encoder.layer.{i}"
        for part in ("query", "key", "value"):
            t.linear(f"{p}.attention.self.{part}", d, d, True)
        t.linear(f"{p}.attention.output.dense", d, d, True)
        t.norm(f"{p}.attention.output.LayerNorm", d, True)
        t.linear(f"{p}.intermediate.dense", c["intermediate_size"], d, True)
        t.linear(f"{p}.output.dense", d, c["intermediate_size"], True)
        t.norm(f"{p}.output.LayerNorm", d, True)
    t.linear("pooler.dense", d, d, True)
    return t


def modern_bert(c):
    t, d = Checkpoint(), c["hidden_size"]
    t.linear("embeddings.tok_embeddings", c["vocab_size"], d)
    t.norm("embeddings.norm", d)
    t.norm("final_norm", d)
    for i in range(c["num_hidden_layers"]):
        p = f"layers.{i}"
        if i > 0:
            # the identity in the first layer
            t.norm(f"{p}.attn_norm", d)
        t.linear(f"{p}.attn.Wqkv", 3 * d, d)
        t.linear(f"{p}.attn.Wo", d, d)
        t.norm(f"{p}.mlp_norm", d)
        t.linear(f"{p}.mlp.Wi", 2 * c["intermediate_size"], d)
        t.linear(f"{p}.mlp.Wo", d, c["intermediate_size"])
    return t


def nomic_bert(c):
    t, d = Checkpoint(), c["n_embd"]
    t.linear("embeddings.word_embeddings", c["vocab_size"], d)
    t.linear("embeddings.token_type_embeddings", 2, d)
    t.norm("emb_ln", d, True)
    for i in range(c["n_layer"]):
        p = f"encoder.layers.{i}"
        t.linear(f"{p}.attn.Wqkv", 3 * d, d)
        t.linear(f"{p}.attn.out_proj", d, d)
        t.mlp(f"{p}.mlp", d, c["n_inner"], "fc11", "fc12", "fc2")
        t.norm(f"{p}.norm1", d, True)
        t.norm(f"{p}.norm2", d, True)
    return t


def jina_bert_v2(c):
    t, d, ff = Checkpoint(), c["hidden_size"], c["intermediate_size"]
    t.linear("embeddings.word_embeddings", c["vocab_size"], d)
    t.linear("embeddings.token_type_embeddings", 2, d)
    t.norm("embeddings.LayerNorm", d, True)
    for i in range(c["num_hidden_layers"]):
        p = f"encoder.layer.{i}"
        for part in ("query", "key", "value"):
            t.linear(f"{p}.attention.self.{part}", d, d, True)
        t.linear(f"{p}.attention.output.dense", d, d, True)
        t.norm(f"{p}.attention.output.LayerNorm", d, True)
        t.linear(f"{p}.mlp.gated_layers", 2 * ff, d)
        t.linear(f"{p}.mlp.wo", d, ff, True)
        t.norm(f"{p}.mlp.layernorm", d, True)
    return t


def t5_encoder(c):
    t, d, inner = Checkpoint(), c["d_model"], c["num_heads"] * c["d_kv"]
    t.linear("shared", c["vocab_size"], d)
    t.norm("encoder.final_layer_norm", d)
    for i in range(c["num_layers"]):
        p = f"encoder.block.{i}.layer"
        for part in "qkv":
            t.linear(f"{p}.0.SelfAttention.{part}", inner, d)
        t.linear(f"{p}.0.SelfAttention.o", d, inner)
        if i == 0:
            # the biases of all layers
            t.linear(f"{p}.0.SelfAttention.relative_attention_bias", c["relative_attention_num_buckets"], c["num_heads"])
        t.norm(f"{p}.0.layer_norm", d)
        t.mlp(f"{p}.1.DenseReluDense", d, c["d_ff"], "wi_0", "wi_1", "wo")
        t.norm(f"{p}.1.layer_norm", d)
    return t


def olmo2(c):
    def block(t, p, i):
        attention(t, f"{p}.self_attn", c, norms="all")
        t.mlp(f"{p}.mlp", c["hidden_size"], c["intermediate_size"])
    return decoder(c, block, norms=("post_attention_layernorm", "post_feedforward_layernorm"))


def qwen3(c):
    def block(t, p, i):
        attention(t, f"{p}.self_attn", c, norms="head")
        t.mlp(f"{p}.mlp", c["hidden_size"], c["intermediate_size"])
    return decoder(c, block)


def qwen2(c):
    def block(t, p, i):
        attention(t, f"{p}.self_attn", c, True)
        t.mlp(f"{p}.mlp", c["hidden_size"], c["intermediate_size"])
    return decoder(c, block)


def gemma2(c):
    def block(t, p, i):
        attention(t, f"{p}.self_attn", c)
        t.mlp(f"{p}.mlp", c["hidden_size"], c["intermediate_size"])
    return decoder(c, block, True, norms=GEMMA_NORMS)


def cohere2(c):
    def block(t, p, i):
        attention(t, f"{p}.self_attn", c)
        t.mlp(f"{p}.mlp", c["hidden_size"], c["intermediate_size"])
    return decoder(c, block, True, norms=("input_layernorm",))


def exaone4(c):
    def block(t, p, i):
        attention(t, f"{p}.self_attn", c, norms="head")
        t.mlp(f"{p}.mlp", c["hidden_size"], c["intermediate_size"])
    return decoder(c, block, norms=("post_attention_layernorm", "post_feedforward_layernorm"))


def hunyuan_moe(c):
    d = c["hidden_size"]

    def block(t, p, i):
        attention(t, f"{p}.self_attn", c, norms="head", norm_names=("query_layernorm", "key_layernorm"))
        t.linear(f"{p}.mlp.gate.wg", c["num_experts"], d)
        experts(t, f"{p}.mlp.experts", c["num_experts"], d, c["moe_intermediate_size"][i])
        t.mlp(f"{p}.mlp.shared_mlp", d, c["intermediate_size"])
    return decoder(c, block)


def starcoder2(c):
    def block(t, p, i):
        attention(t, f"{p}.self_attn", c, True, True)
        t.linear(f"{p}.mlp.c_fc", c["intermediate_size"], c["hidden_size"], True)
        t.linear(f"{p}.mlp.c_proj", c["hidden_size"], c["intermediate_size"], True)
    return decoder(c, block, True, norm_bias=True)


def gpt_neox(c):
    d, ff = c["hidden_size"], c["intermediate_size"]

    def block(t, p, i):
        t.linear(f"{p}.attention.query_key_value", 3 * d, d, True)
        t.linear(f"{p}.attention.dense", d, d, True)
        t.linear(f"{p}.mlp.dense_h_to_4h", ff, d, True)
        t.linear(f"{p}.mlp.dense_4h_to_h", d, ff, True)
    return decoder(c, block, False, "gpt_neox", "embed_in", "final_layer_norm", "embed_out", norm_bias=True)


def gpt2(c):
    t, d = Checkpoint(), c["n_embd"]
    t.linear("wte", c["vocab_size"], d)
    t.linear("wpe", c["n_ctx"], d)
    t.norm("ln_f", d, True)
    for i in range(c["n_layer"]):
        p = f"h.{i}"
        t.norm(f"{p}.ln_1", d, True)
        t.norm(f"{p}.ln_2", d, True)
        # Conv1D: transposed
        for name, columns, rows in [("attn.c_attn", d, 3 * d), ("attn.c_proj", d, d), ("mlp.c_fc", d, 4 * d), ("mlp.c_proj", 4 * d, d)]:
            t[f"{p}.{name}.weight"], t[f"{p}.{name}.bias"] = (columns, rows), (rows,)
    return t


def ernie_moe(c):
    d, moe = c["hidden_size"], c["moe_intermediate_size"]

    def block(t, p, i):
        attention(t, f"{p}.self_attn", c)
        if i < c["moe_layer_start_index"]:
            t.mlp(f"{p}.mlp", d, c["intermediate_size"])
            return
        t.linear(f"{p}.mlp.gate", c["moe_num_experts"], d)
        t[f"{p}.mlp.moe_statics.e_score_correction_bias"] = (1, c["moe_num_experts"])
        experts(t, f"{p}.mlp.experts", c["moe_num_experts"], d, moe)
        t.mlp(f"{p}.mlp.shared_experts", d, moe * c["moe_num_shared_experts"])
    return decoder(c, block)


def falcon_h1(c):
    d = c["hidden_size"]

    def block(t, p, i):
        attention(t, f"{p}.self_attn", c)
        inner, heads = c["mamba_d_ssm"], c["mamba_n_heads"]
        norm = c["mamba_rms_norm"]
        mamba2_mixer(t, f"{p}.mamba", d, inner, c["mamba_n_groups"], c["mamba_d_state"], heads, c["mamba_d_conv"], norm)
        t.mlp(f"{p}.feed_forward", d, c["intermediate_size"])
    return decoder(c, block, norm="final_layernorm", norms=("input_layernorm", "pre_ff_layernorm"))


def llada(c):
    t, d, ff = Checkpoint(), c["d_model"], c["mlp_hidden_size"]
    m = "model.transformer"
    t.linear(f"{m}.wte", c["vocab_size"], d)
    t.norm(f"{m}.ln_f", d)
    t.linear(f"{m}.ff_out", c["vocab_size"], d)
    for i in range(c["n_layers"]):
        p = f"{m}.blocks.{i}"
        for part in ("q_proj", "k_proj", "v_proj", "attn_out"):
            t.linear(f"{p}.{part}", d, d)
        t.mlp(p, d, ff, "ff_proj", "up_proj", "ff_out")
        t.norm(f"{p}.attn_norm", d)
        t.norm(f"{p}.ff_norm", d)
    return t


def llada_moe(c):
    def block(t, p, i):
        attention(t, f"{p}.self_attn", c, norms="head")
        t.linear(f"{p}.mlp.gate", c["num_experts"], c["hidden_size"])
        experts(t, f"{p}.mlp.experts", c["num_experts"], c["hidden_size"], c["expert_intermediate_size"])
    return decoder(c, block)


def olmoe(c):
    def block(t, p, i):
        attention(t, f"{p}.self_attn", c, norms="all")
        t.linear(f"{p}.mlp.gate", c["num_experts"], c["hidden_size"])
        experts(t, f"{p}.mlp.experts", c["num_experts"], c["hidden_size"], c["intermediate_size"])
    return decoder(c, block)


def seed_oss(c):
    def block(t, p, i):
        attention(t, f"{p}.self_attn", c, True)
        t.mlp(f"{p}.mlp", c["hidden_size"], c["intermediate_size"])
    return decoder(c, block)


def apertus(c):
    def block(t, p, i):
        attention(t, f"{p}.self_attn", c, norms="head")
        t.mlp(f"{p}.mlp", c["hidden_size"], c["intermediate_size"], None)
        for part in ("alpha_p", "alpha_n", "beta", "eps"):
            t[f"{p}.mlp.act_fn.{part}"] = (1,)
    return decoder(c, block, norms=("attention_layernorm", "feedforward_layernorm"))


def dots1(c):
    def block(t, p, i):
        attention(t, f"{p}.self_attn", c, norms="head")
        if i < c["first_k_dense_replace"]:
            t.mlp(f"{p}.mlp", c["hidden_size"], c["intermediate_size"])
        else:
            shared_experts(t, f"{p}.mlp", c, True)
    return decoder(c, block)


def bailing(c):
    """Ling 2: fused attention, a dense first layer, an MTP layer."""
    d, n, kv, h = sizes(c)
    layers = c["num_hidden_layers"]

    def block(t, p, i):
        t.linear(f"{p}.attention.query_key_value", (n + 2 * kv) * h, d)
        t.linear(f"{p}.attention.dense", d, n * h)
        t.norm(f"{p}.attention.query_layernorm", h)
        t.norm(f"{p}.attention.key_layernorm", h)
        if i < c["first_k_dense_replace"]:
            t.mlp(f"{p}.mlp", d, c["intermediate_size"])
        else:
            t.linear(f"{p}.mlp.gate", c["num_experts"], d)
            t[f"{p}.mlp.gate.expert_bias"] = (c["num_experts"],)
            experts(t, f"{p}.mlp.experts", c["num_experts"], d, c["moe_intermediate_size"])
            t.mlp(f"{p}.mlp.shared_experts", d, c["moe_intermediate_size"] * c["num_shared_experts"])
        if i >= layers:
            t.linear(f"{p}.eh_proj", d, 2 * d)
            for name in ("enorm", "hnorm", "final_layernorm"):
                t.norm(f"{p}.{name}", d)
    all_layers = layers + c["num_nextn_predict_layers"]
    return decoder({**c, "num_hidden_layers": all_layers}, block, embed="word_embeddings")


def falcon(c):
    t, d = Checkpoint(), c["hidden_size"]
    t.linear("transformer.word_embeddings", c["vocab_size"], d)
    t.norm("transformer.ln_f", d, True)
    t.linear("lm_head", c["vocab_size"], d)
    for i in range(c["num_hidden_layers"]):
        p = f"transformer.h.{i}"
        t.norm(f"{p}.input_layernorm", d, True)
        t.linear(f"{p}.self_attention.query_key_value", d + 2 * d // c["num_attention_heads"], d)
        t.linear(f"{p}.self_attention.dense", d, d)
        t.linear(f"{p}.mlp.dense_h_to_4h", 4 * d, d)
        t.linear(f"{p}.mlp.dense_4h_to_h", d, 4 * d)
    return t


def stablelm(c):
    def block(t, p, i):
        attention(t, f"{p}.self_attn", c, True)
        t.mlp(f"{p}.mlp", c["hidden_size"], c["intermediate_size"])
    return decoder(c, block, norm_bias=True)


def nemotron(c):
    def block(t, p, i):
        attention(t, f"{p}.self_attn", c)
        t.mlp(f"{p}.mlp", c["hidden_size"], c["intermediate_size"], None)
    return decoder(c, block, norm_bias=True)


def minicpm3(c):
    def block(t, p, i):
        latent_attention(t, f"{p}.self_attn", c)
        t.mlp(f"{p}.mlp", c["hidden_size"], c["intermediate_size"])
    return decoder(c, block)


def mamba2(c):
    def block(t, p, i):
        heads = c["num_heads"]
        inner = heads * c["head_dim"]
        mamba2_mixer(t, f"{p}.mixer", c["hidden_size"], inner, c["n_groups"], c["state_size"], heads, c["conv_kernel"])
    return decoder(c, block, False, "backbone", "embeddings", "norm_f", norms=("norm",))


def internlm2(c):
    t, d = Checkpoint(), c["hidden_size"]
    _, n, kv, h = sizes(c)
    t.linear("model.tok_embeddings", c["vocab_size"], d)
    t.norm("model.norm", d)
    t.linear("output", c["vocab_size"], d)
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}"
        t.linear(f"{p}.attention.wqkv", (n + 2 * kv) * h, d)
        t.linear(f"{p}.attention.wo", d, n * h)
        t.mlp(f"{p}.feed_forward", d, c["intermediate_size"], *MIXTRAL)
        t.norm(f"{p}.attention_norm", d)
        t.norm(f"{p}.ffn_norm", d)
    return t


LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
DEEPSEEK3 = dict(
    architectures=["DeepseekV3ForCausalLM"], hidden_size=7168, intermediate_size=18432, moe_intermediate_size=2048, num_hidden_layers=61,
    num_attention_heads=128, num_key_value_heads=128, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8, n_group=8, topk_group=4, first_k_dense_replace=3, routed_scaling_factor=2.5,
    norm_topk_prob=True, scoring_func="sigmoid", num_nextn_predict_layers=1, max_position_embeddings=163840, rms_norm_eps=1e-6, rope_theta=10000,
    rope_scaling={**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, vocab_size=129280)
QWEN35 = dict(
    linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_num_key_heads=16, linear_value_head_dim=128, full_attention_interval=4,
    head_dim=256, mtp_num_hidden_layers=1, max_position_embeddings=262144, rms_norm_eps=1e-6, vocab_size=248320,
    rope_parameters={"rope_theta": 10000000, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10], "rope_type": "default"})
GEMMA4_LAYERS = ["sliding_attention"] * 5 + ["full_attention"]
GEMMA4 = dict(
    head_dim=256, global_head_dim=512, num_kv_shared_layers=0, hidden_size_per_layer_input=0, num_global_key_value_heads=None,
    attention_k_eq_v=False, enable_moe_block=False, moe_intermediate_size=None, final_logit_softcapping=30.0, max_position_embeddings=131072, rms_norm_eps=1e-6,
    vocab_size=262144, rope_parameters={"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
                                        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}})
LFM2_LAYERS = ["full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)]
LFM2MOE_LAYERS = ["full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)]
HYBRID = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"

#: Model, tensors, and what its config.json says.
MODELS = [
    ("meta-llama/Llama-3.1-8B", plain, dict(
        architectures=["LlamaForCausalLM"], hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=500000.0, rope_scaling=LLAMA3_ROPE, vocab_size=128256)),
    ("mistralai/Mistral-7B-v0.3", plain, dict(
        architectures=["MistralForCausalLM"], hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=32768, rms_norm_eps=1e-5, rope_theta=1000000.0, vocab_size=32768)),
    ("mistralai/Mixtral-8x7B-v0.1", mixtral, dict(
        architectures=["MixtralForCausalLM"], hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=32768, rms_norm_eps=1e-5, rope_theta=1000000.0,
        vocab_size=32000)),
    ("Qwen/Qwen2.5-7B", qwen2, dict(
        architectures=["Qwen2ForCausalLM"], hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4, max_position_embeddings=131072, rms_norm_eps=1e-6, rope_theta=1000000.0, vocab_size=152064)),
    ("Qwen/Qwen2-57B-A14B", qwen2moe, dict(
        architectures=["Qwen2MoeForCausalLM"], hidden_size=3584, intermediate_size=18944, moe_intermediate_size=2560,
        shared_expert_intermediate_size=20480, num_experts=64, num_experts_per_tok=8, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4, max_position_embeddings=131072, rms_norm_eps=1e-6, rope_theta=1000000.0, vocab_size=151936)),
    ("Qwen/Qwen3-8B", qwen3, dict(
        architectures=["Qwen3ForCausalLM"], hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, rms_norm_eps=1e-6, rope_theta=1000000, vocab_size=151936)),
    ("Qwen/Qwen3-30B-A3B", qwen3moe, dict(
        architectures=["Qwen3MoeForCausalLM"], hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_experts=128,
        num_experts_per_tok=8, norm_topk_prob=True, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        max_position_embeddings=40960, rms_norm_eps=1e-6, rope_theta=1000000.0, vocab_size=151936)),
    ("Qwen/Qwen3-Next-80B-A3B-Instruct", qwen3next, dict(
        architectures=["Qwen3NextForCausalLM"], hidden_size=2048, intermediate_size=5120, moe_intermediate_size=512,
        shared_expert_intermediate_size=512, num_experts=512, num_experts_per_tok=10, norm_topk_prob=True, num_hidden_layers=48,
        full_attention_interval=4, linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_num_key_heads=16, linear_num_value_heads=32,
        linear_value_head_dim=128, num_attention_heads=16, num_key_value_heads=2, head_dim=256, partial_rotary_factor=0.25,
        max_position_embeddings=262144, rms_norm_eps=1e-6, rope_theta=10000000, vocab_size=151936)),
    ("Qwen/Qwen3.5-27B", qwen35, dict(architectures=["Qwen3_5ForConditionalGeneration"], text_config=dict(
        QWEN35, hidden_size=5120, intermediate_size=17408, num_hidden_layers=64, num_attention_heads=24, num_key_value_heads=4,
        linear_num_value_heads=48))),
    ("Qwen/Qwen3.5-35B-A3B", qwen35, dict(architectures=["Qwen3_5MoeForConditionalGeneration"], text_config=dict(
        QWEN35, hidden_size=2048, num_hidden_layers=40, num_attention_heads=16, num_key_value_heads=2, linear_num_value_heads=32,
        num_experts=256, num_experts_per_tok=8, moe_intermediate_size=512, shared_expert_intermediate_size=512))),
    ("google/gemma-4-E4B-it", gemma4, dict(architectures=["Gemma4ForConditionalGeneration"], text_config=dict(
        GEMMA4, hidden_size=2560, intermediate_size=10240, num_hidden_layers=42, num_attention_heads=8, num_key_value_heads=2,
        num_kv_shared_layers=18, hidden_size_per_layer_input=256, vocab_size_per_layer_input=262144, sliding_window=512,
        layer_types=GEMMA4_LAYERS * 7))),
    ("google/gemma-4-31B-it", gemma4, dict(architectures=["Gemma4ForConditionalGeneration"], text_config=dict(
        GEMMA4, hidden_size=5376, intermediate_size=21504, num_hidden_layers=60, num_attention_heads=32, num_key_value_heads=16,
        num_global_key_value_heads=4, attention_k_eq_v=True, sliding_window=1024, layer_types=GEMMA4_LAYERS * 10))),
    ("google/gemma-4-26B-A4B-it", gemma4, dict(architectures=["Gemma4ForConditionalGeneration"], text_config=dict(
        GEMMA4, hidden_size=2816, intermediate_size=2112, num_hidden_layers=30, num_attention_heads=16, num_key_value_heads=8,
        num_global_key_value_heads=2, attention_k_eq_v=True, enable_moe_block=True, num_experts=128, top_k_experts=8,
        moe_intermediate_size=704, sliding_window=1024, layer_types=GEMMA4_LAYERS * 5))),
    ("google/gemma-2b", plain, dict(
        architectures=["GemmaForCausalLM"], hidden_size=2048, intermediate_size=16384, num_hidden_layers=18, num_attention_heads=8,
        num_key_value_heads=1, head_dim=256, max_position_embeddings=8192, rms_norm_eps=1e-6, rope_theta=10000.0, tie_word_embeddings=True,
        vocab_size=256000)),
    ("google/gemma-2-9b", gemma2, dict(
        architectures=["Gemma2ForCausalLM"], hidden_size=3584, intermediate_size=14336, num_hidden_layers=42, num_attention_heads=16,
        num_key_value_heads=8, head_dim=256, attn_logit_softcapping=50.0, final_logit_softcapping=30.0, query_pre_attn_scalar=256,
        sliding_window=4096, max_position_embeddings=8192, rms_norm_eps=1e-6, rope_theta=10000.0, vocab_size=256000)),
    ("google/gemma-3-1b-it", gemma_text, dict(
        architectures=["Gemma3ForCausalLM"], hidden_size=1152, intermediate_size=6912, num_hidden_layers=26, num_attention_heads=4,
        num_key_value_heads=1, head_dim=256, sliding_window=512, sliding_window_pattern=6, query_pre_attn_scalar=256,
        max_position_embeddings=32768, rms_norm_eps=1e-6, rope_theta=1000000, rope_local_base_freq=10000, vocab_size=262144)),
    ("google/gemma-3n-E2B-it", gemma3n, dict(architectures=["Gemma3nForConditionalGeneration"], text_config=dict(
        hidden_size=2048, intermediate_size=[8192] * 30, num_hidden_layers=30, num_attention_heads=8, num_key_value_heads=2, head_dim=256,
        hidden_size_per_layer_input=256, vocab_size_per_layer_input=262144, altup_num_inputs=4, altup_active_idx=0, laurel_rank=64,
        num_kv_shared_layers=10, activation_sparsity_pattern=[0.95] * 10 + [0.0] * 20, sliding_window=512, final_logit_softcapping=30.0,
        layer_types=(["sliding_attention"] * 4 + ["full_attention"]) * 6, max_position_embeddings=32768, rms_norm_eps=1e-6,
        rope_theta=1000000.0, rope_local_base_freq=10000.0, vocab_size=262400))),
    ("google/embeddinggemma-300m", embedding_gemma, dict(
        architectures=["Gemma3TextModel"], hidden_size=768, intermediate_size=1152, num_hidden_layers=24, num_attention_heads=3,
        num_key_value_heads=1, head_dim=256, sliding_window=512, query_pre_attn_scalar=256, use_bidirectional_attention=True,
        max_position_embeddings=2048, rms_norm_eps=1e-6, rope_theta=1000000.0, rope_local_base_freq=10000.0, vocab_size=262144)),
    ("openai/gpt-oss-20b", gpt_oss, dict(
        architectures=["GptOssForCausalLM"], hidden_size=2880, intermediate_size=2880, num_hidden_layers=24, num_attention_heads=64,
        num_key_value_heads=8, head_dim=64, num_local_experts=32, num_experts_per_tok=4, sliding_window=128, max_position_embeddings=131072,
        rms_norm_eps=1e-5, rope_theta=150000,
        rope_scaling={"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 4096},
        vocab_size=201088)),
    ("deepseek-ai/DeepSeek-V2-Lite", lambda c: deepseek(c, has_bias=False), dict(
        architectures=["DeepseekV2ForCausalLM"], hidden_size=2048, intermediate_size=10944, moe_intermediate_size=1408, num_hidden_layers=27,
        num_attention_heads=16, num_key_value_heads=16, q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
        v_head_dim=128, n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6, n_group=1, topk_group=1, first_k_dense_replace=1,
        routed_scaling_factor=1.0, norm_topk_prob=False, scoring_func="softmax", max_position_embeddings=163840, rms_norm_eps=1e-6,
        rope_theta=10000, rope_scaling={**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}, vocab_size=102400)),
    ("deepseek-ai/DeepSeek-V3", deepseek, DEEPSEEK3),
    ("deepseek-ai/DeepSeek-V3.2", lambda c: deepseek(c, True), {
        **DEEPSEEK3, "architectures": ["DeepseekV32ForCausalLM"], "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048}),
    ("moonshotai/Kimi-Linear-48B-A3B-Instruct", kimi_linear, dict(
        architectures=["KimiLinearForCausalLM"], hidden_size=2304, intermediate_size=9216, moe_intermediate_size=1024, num_hidden_layers=27,
        num_attention_heads=32, num_key_value_heads=32, head_dim=72, q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128,
        qk_rope_head_dim=64, v_head_dim=128, mla_use_nope=True, num_experts=256, num_experts_per_token=8, num_shared_experts=1,
        first_k_dense_replace=1, routed_scaling_factor=2.446, moe_renormalize=True, moe_router_activation_func="sigmoid",
        num_expert_group=1, topk_group=1, model_max_length=1048576, rms_norm_eps=1e-5, rope_theta=10000.0, vocab_size=163840,
        linear_attn_config=dict(full_attn_layers=[4, 8, 12, 16, 20, 24, 27], head_dim=128, num_heads=32, short_conv_kernel_size=4,
                                kda_layers=[i for i in range(1, 27) if i % 4]))),
    ("MiniMaxAI/MiniMax-M2", minimax_m2, dict(
        architectures=["MiniMaxM2ForCausalLM"], hidden_size=3072, intermediate_size=1536, num_hidden_layers=62, num_attention_heads=48,
        num_key_value_heads=8, head_dim=128, rotary_dim=64, num_local_experts=256, num_experts_per_tok=8, scoring_func="sigmoid",
        max_position_embeddings=196608, rms_norm_eps=1e-6, rope_theta=5000000, vocab_size=200064)),
    ("zai-org/GLM-4-9B-0414", glm4, dict(
        architectures=["Glm4ForCausalLM"], hidden_size=4096, intermediate_size=13696, num_hidden_layers=40, num_attention_heads=32,
        num_key_value_heads=2, head_dim=128, partial_rotary_factor=0.5, max_position_embeddings=32768, rms_norm_eps=1e-5, rope_theta=10000.0,
        vocab_size=151552)),
    ("zai-org/GLM-4.5-Air", glm4moe, dict(
        architectures=["Glm4MoeForCausalLM"], hidden_size=4096, intermediate_size=10944, moe_intermediate_size=1408, num_hidden_layers=46,
        num_attention_heads=96, num_key_value_heads=8, head_dim=128, partial_rotary_factor=0.5, use_qk_norm=False, attention_bias=True,
        n_routed_experts=128, n_shared_experts=1, num_experts_per_tok=8, n_group=1, topk_group=1, first_k_dense_replace=1,
        routed_scaling_factor=1.0, norm_topk_prob=True, num_nextn_predict_layers=1, max_position_embeddings=131072, rms_norm_eps=1e-5,
        rope_theta=1000000, vocab_size=151552)),
    ("meta-llama/Llama-4-Scout-17B-16E", llama4, dict(architectures=["Llama4ForConditionalGeneration"], text_config=dict(
        hidden_size=5120, intermediate_size=8192, intermediate_size_mlp=16384, num_hidden_layers=48, num_attention_heads=40,
        num_key_value_heads=8, head_dim=128, num_local_experts=16, num_experts_per_tok=1, interleave_moe_layer_step=1,
        attention_chunk_size=8192, max_position_embeddings=262144, rms_norm_eps=1e-5, rope_theta=500000.0, vocab_size=202048,
        rope_scaling={**LLAMA3_ROPE, "factor": 16.0, "high_freq_factor": 1.0}))),
    ("microsoft/phi-2", phi2, dict(
        architectures=["PhiForCausalLM"], hidden_size=2560, intermediate_size=10240, num_hidden_layers=32, num_attention_heads=32,
        partial_rotary_factor=0.4, max_position_embeddings=2048, layer_norm_eps=1e-5, rope_theta=10000.0, vocab_size=51200)),
    ("microsoft/Phi-3.5-mini-instruct", phi3, dict(
        architectures=["Phi3ForCausalLM"], hidden_size=3072, intermediate_size=8192, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=32, max_position_embeddings=131072, original_max_position_embeddings=4096, sliding_window=262144,
        rms_norm_eps=1e-5, rope_theta=10000.0, rope_scaling={"type": "longrope", "long_factor": [1.0] * 48, "short_factor": [1.0] * 48},
        vocab_size=32064)),
    ("microsoft/Phi-3.5-MoE-instruct", phimoe, dict(
        architectures=["PhiMoEForCausalLM"], hidden_size=4096, intermediate_size=6400, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, num_local_experts=16, num_experts_per_tok=2, max_position_embeddings=131072,
        original_max_position_embeddings=4096, sliding_window=131072, rms_norm_eps=1e-5, rope_theta=10000.0,
        rope_scaling={"type": "longrope", "long_factor": [1.0] * 64, "short_factor": [1.0] * 64, "long_mscale": 1.243163121016122,
                      "short_mscale": 1.243163121016122, "original_max_position_embeddings": 4096}, vocab_size=32064)),
    ("ibm-granite/granite-3.1-8b-instruct", plain, dict(
        architectures=["GraniteForCausalLM"], hidden_size=4096, intermediate_size=12800, num_hidden_layers=40, num_attention_heads=32,
        num_key_value_heads=8, attention_multiplier=0.0078125, embedding_multiplier=12.0, residual_multiplier=0.22, logits_scaling=16.0,
        max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=10000000.0, tie_word_embeddings=True, vocab_size=49155)),
    ("ibm-granite/granite-4.0-h-tiny", granite_hybrid, dict(
        architectures=["GraniteMoeHybridForCausalLM"], hidden_size=1536, intermediate_size=512, shared_intermediate_size=1024,
        num_local_experts=64, num_experts_per_tok=6, num_hidden_layers=40, num_attention_heads=12, num_key_value_heads=4,
        layer_types=["attention" if i % 10 == 5 else "mamba" for i in range(40)], mamba_n_heads=48, mamba_d_head=64, mamba_n_groups=1,
        mamba_d_state=128, mamba_d_conv=4, mamba_expand=2, mamba_chunk_size=256, attention_multiplier=0.0078125, embedding_multiplier=12,
        residual_multiplier=0.22, logits_scaling=6, position_embedding_type="nope", max_position_embeddings=131072, rms_norm_eps=1e-5,
        rope_theta=10000, tie_word_embeddings=True, vocab_size=100352)),
    ("nvidia/Nemotron-H-8B-Base-8K", nemotron_h, dict(
        architectures=["NemotronHForCausalLM"], hidden_size=4096, intermediate_size=21504, num_hidden_layers=52,
        hybrid_override_pattern=HYBRID, num_attention_heads=32, num_key_value_heads=8, head_dim=128, attention_head_dim=128,
        mamba_num_heads=128, mamba_head_dim=64, n_groups=8, ssm_state_size=128, conv_kernel=4, chunk_size=128,
        max_position_embeddings=8192, layer_norm_epsilon=1e-5, rms_norm_eps=1e-5, vocab_size=131072)),
    ("LiquidAI/LFM2-1.2B", lfm2, dict(
        architectures=["Lfm2ForCausalLM"], hidden_size=2048, intermediate_size=8192, block_ff_dim=12288, block_auto_adjust_ff_dim=True,
        block_ffn_dim_multiplier=1.0, block_multiple_of=256, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
        layer_types=LFM2_LAYERS, conv_L_cache=3, max_position_embeddings=128000, norm_eps=1e-5, rope_theta=1000000.0, vocab_size=65536)),
    ("LiquidAI/LFM2-8B-A1B", lfm2, dict(
        architectures=["Lfm2MoeForCausalLM"], hidden_size=2048, intermediate_size=7168, moe_intermediate_size=1792, num_experts=32,
        num_experts_per_tok=4, num_dense_layers=2, norm_topk_prob=True, use_expert_bias=True, num_hidden_layers=24,
        num_attention_heads=32, num_key_value_heads=8, layer_types=LFM2MOE_LAYERS, conv_L_cache=3, max_position_embeddings=128000,
        norm_eps=1e-5, rope_theta=1000000.0, vocab_size=65536)),
    ("state-spaces/mamba-130m-hf", mamba, dict(
        architectures=["MambaForCausalLM"], hidden_size=768, intermediate_size=1536, num_hidden_layers=24, state_size=16, conv_kernel=4,
        time_step_rank=48, expand=2, layer_norm_epsilon=1e-5, vocab_size=50280)),
    ("ai21labs/Jamba-v0.1", jamba, dict(
        architectures=["JambaForCausalLM"], hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, attn_layer_period=8, attn_layer_offset=4, expert_layer_period=2, expert_layer_offset=1, num_experts=16,
        num_experts_per_tok=2, mamba_d_state=16, mamba_d_conv=4, mamba_expand=2, mamba_dt_rank=256, max_position_embeddings=262144,
        rms_norm_eps=1e-6, vocab_size=65536)),
    ("BAAI/bge-base-en-v1.5", bert, dict(
        architectures=["BertModel"], hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12,
        max_position_embeddings=512, type_vocab_size=2, layer_norm_eps=1e-12, vocab_size=30522)),
    ("Alibaba-NLP/gte-modernbert-base", modern_bert, dict(
        architectures=["ModernBertModel"], hidden_size=768, intermediate_size=1152, num_hidden_layers=22, num_attention_heads=12,
        hidden_activation="gelu", local_attention=128, global_attn_every_n_layers=3, global_rope_theta=160000.0, local_rope_theta=10000.0,
        max_position_embeddings=8192, layer_norm_eps=1e-5, norm_eps=1e-5, vocab_size=50368)),
    ("nomic-ai/nomic-embed-text-v1.5", nomic_bert, dict(
        architectures=["NomicBertModel"], n_embd=768, n_inner=3072, n_layer=12, n_head=12, n_positions=2048, activation_function="swiglu",
        qkv_proj_bias=False, mlp_fc1_bias=False, mlp_fc2_bias=False, rotary_emb_fraction=1.0, rotary_emb_base=1000, rotary_emb_interleaved=False,
        rotary_emb_scale_base=None, causal=False, prenorm=False, type_vocab_size=2, layer_norm_epsilon=1e-12, vocab_size=30528)),
    ("jinaai/jina-embeddings-v2-base-en", jina_bert_v2, dict(
        architectures=["JinaBertForMaskedLM"], hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12,
        max_position_embeddings=8192, type_vocab_size=2, layer_norm_eps=1e-12, position_embedding_type="alibi", feed_forward_type="geglu",
        vocab_size=30528)),
    ("google/t5-v1_1-base", t5_encoder, dict(
        architectures=["T5EncoderModel"], d_model=768, d_ff=2048, d_kv=64, num_heads=12, num_layers=12, n_positions=512,
        relative_attention_num_buckets=32, layer_norm_epsilon=1e-6, is_gated_act=True, feed_forward_proj="gated-gelu", vocab_size=32128)),
    ("allenai/OLMo-2-1124-7B", olmo2, dict(
        architectures=["Olmo2ForCausalLM"], hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=32, max_position_embeddings=4096, rms_norm_eps=1e-6, rope_theta=500000, vocab_size=100352)),
    ("CohereLabs/c4ai-command-r7b-12-2024", cohere2, dict(
        architectures=["Cohere2ForCausalLM"], hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, rotary_pct=1.0, sliding_window=4096, sliding_window_pattern=4, logit_scale=0.25,
        max_position_embeddings=8192, layer_norm_eps=1e-5, rope_theta=50000, vocab_size=256000)),
    ("LGAI-EXAONE/EXAONE-4.0-32B", exaone4, dict(
        architectures=["Exaone4ForCausalLM"], hidden_size=5120, intermediate_size=27392, num_hidden_layers=64, num_attention_heads=40,
        num_key_value_heads=8, head_dim=128, sliding_window=4096, sliding_window_pattern="LLLG", max_position_embeddings=131072,
        rms_norm_eps=1e-5, rope_theta=1000000, rope_scaling={**LLAMA3_ROPE, "factor": 16.0}, vocab_size=102400)),
    ("tencent/Hunyuan-A13B-Instruct", hunyuan_moe, dict(
        architectures=["HunYuanMoEV1ForCausalLM"], hidden_size=4096, intermediate_size=3072, moe_intermediate_size=[3072] * 32,
        num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, head_dim=128, num_experts=64, moe_topk=[8] * 32,
        num_shared_expert=[1] * 32, max_position_embeddings=32768, rms_norm_eps=1e-5, rope_theta=10000.0,
        rope_scaling={"type": "dynamic", "factor": 1.0, "alpha": 1000.0}, tie_word_embeddings=True, vocab_size=128167)),
    ("bigcode/starcoder2-3b", starcoder2, dict(
        architectures=["Starcoder2ForCausalLM"], hidden_size=3072, intermediate_size=12288, num_hidden_layers=30, num_attention_heads=24,
        num_key_value_heads=2, sliding_window=4096, max_position_embeddings=16384, norm_epsilon=1e-5, rope_theta=999999.4420358813,
        vocab_size=49152)),
    ("EleutherAI/pythia-1b", gpt_neox, dict(
        architectures=["GPTNeoXForCausalLM"], hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=8,
        rotary_pct=0.25, rotary_emb_base=10000, use_parallel_residual=True, max_position_embeddings=2048, layer_norm_eps=1e-5, vocab_size=50304)),
    ("openai-community/gpt2", gpt2, dict(
        architectures=["GPT2LMHeadModel"], n_embd=768, n_layer=12, n_head=12, n_ctx=1024, layer_norm_epsilon=1e-5, vocab_size=50257)),
    ("baidu/ERNIE-4.5-21B-A3B-PT", ernie_moe, dict(
        architectures=["Ernie4_5_MoeForCausalLM"], hidden_size=2560, intermediate_size=12288, moe_intermediate_size=1536,
        num_hidden_layers=28, num_attention_heads=20, num_key_value_heads=4, head_dim=128, moe_num_experts=64, moe_k=6,
        moe_num_shared_experts=2, moe_layer_start_index=1, moe_layer_interval=1, max_position_embeddings=131072, rms_norm_eps=1e-5,
        rope_theta=500000.0, tie_word_embeddings=True, vocab_size=103424)),
    ("tiiuae/Falcon-H1-1.5B-Instruct", falcon_h1, dict(
        architectures=["FalconH1ForCausalLM"], hidden_size=2048, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=8,
        num_key_value_heads=2, head_dim=128, mamba_d_ssm=3072, mamba_n_heads=48, mamba_d_head=64, mamba_n_groups=1, mamba_d_state=256,
        mamba_d_conv=4, mamba_expand=2, mamba_chunk_size=256, mamba_rms_norm=False, attention_in_multiplier=1.0, attention_out_multiplier=1.0,
        key_multiplier=1.0, lm_head_multiplier=1.0, embedding_multiplier=1.0, mlp_multipliers=[1.0, 1.0], ssm_in_multiplier=1.0,
        ssm_out_multiplier=1.0, ssm_multipliers=[1.0] * 5, max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=100000000000.0,
        vocab_size=65537)),
    ("GSAI-ML/LLaDA-8B-Instruct", llada, dict(
        architectures=["LLaDAModelLM"], d_model=4096, hidden_size=4096, mlp_hidden_size=12288, n_layers=32, n_heads=32, n_kv_heads=32,
        max_sequence_length=4096, rms_norm_eps=1e-5, rope_theta=500000.0, mask_token_id=126336, vocab_size=126464)),
    ("Dream-org/Dream-v0-Instruct-7B", qwen2, dict(
        architectures=["DreamModel"], hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4, max_position_embeddings=131072, rms_norm_eps=1e-6, rope_theta=1000000.0, mask_token_id=151666, vocab_size=152064)),
    ("inclusionAI/LLaDA-MoE-7B-A1B-Instruct", llada_moe, dict(
        architectures=["LLaDAMoEModelLM"], hidden_size=2048, intermediate_size=8192, expert_intermediate_size=1024, dense_intermediate_size=8192,
        num_experts=64, num_experts_per_tok=8, num_hidden_layers=16, num_attention_heads=16, num_key_value_heads=16, norm_topk_prob=None,
        max_position_embeddings=8192, rms_norm_eps=1e-5, rope_theta=50000, vocab_size=157184)),
    ("radicalnumerics/RND1-Base-0910", qwen3moe, dict(
        architectures=["RND1"], hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
        norm_topk_prob=True, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128, mask_token_id=151669,
        max_position_embeddings=40960, rms_norm_eps=1e-6, rope_theta=1000000.0, vocab_size=151936)),
    ("allenai/OLMoE-1B-7B-0924", olmoe, dict(
        architectures=["OlmoeForCausalLM"], hidden_size=2048, intermediate_size=1024, num_experts=64, num_experts_per_tok=8,
        norm_topk_prob=False, num_hidden_layers=16, num_attention_heads=16, num_key_value_heads=16, max_position_embeddings=4096,
        rms_norm_eps=1e-5, rope_theta=10000.0, vocab_size=50304)),
    ("HuggingFaceTB/SmolLM3-3B", plain, dict(
        architectures=["SmolLM3ForCausalLM"], hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16,
        num_key_value_heads=4, max_position_embeddings=65536, rms_norm_eps=1e-6, rope_theta=5000000.0, tie_word_embeddings=True,
        vocab_size=128256)),
    ("ByteDance-Seed/Seed-OSS-36B-Instruct", seed_oss, dict(
        architectures=["SeedOssForCausalLM"], hidden_size=5120, intermediate_size=27648, num_hidden_layers=64, num_attention_heads=80,
        num_key_value_heads=8, head_dim=128, attention_bias=True, max_position_embeddings=524288, rms_norm_eps=1e-6, rope_theta=10000000.0,
        vocab_size=155136)),
    ("swiss-ai/Apertus-8B-2509", apertus, dict(
        architectures=["ApertusForCausalLM"], hidden_size=4096, intermediate_size=21504, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, hidden_act="xielu", max_position_embeddings=65536, rms_norm_eps=1e-5, rope_theta=12000000,
        rope_scaling={**LLAMA3_ROPE, "factor": 8.0}, vocab_size=131072)),
    ("rednote-hilab/dots.llm1.inst", dots1, dict(
        architectures=["Dots1ForCausalLM"], hidden_size=4096, intermediate_size=10944, moe_intermediate_size=1408, num_hidden_layers=62,
        num_attention_heads=32, num_key_value_heads=32, n_routed_experts=128, n_shared_experts=2, num_experts_per_tok=6, n_group=1,
        topk_group=1, first_k_dense_replace=1, routed_scaling_factor=2.5, norm_topk_prob=True, scoring_func="sigmoid",
        max_position_embeddings=32768, rms_norm_eps=1e-5, rope_theta=10000000, vocab_size=152064)),
    ("inclusionAI/Ling-mini-2.0", bailing, dict(
        architectures=["BailingMoeV2ForCausalLM"], hidden_size=2048, intermediate_size=5120, moe_intermediate_size=512, num_hidden_layers=20,
        num_attention_heads=16, num_key_value_heads=4, head_dim=128, num_experts=256, num_experts_per_tok=8, num_shared_experts=1,
        n_group=8, topk_group=4, first_k_dense_replace=1, routed_scaling_factor=2.5, norm_topk_prob=True, score_function="sigmoid",
        partial_rotary_factor=0.5, num_nextn_predict_layers=1, max_position_embeddings=32768, rms_norm_eps=1e-6, rope_theta=600000,
        vocab_size=157184)),
    ("tiiuae/falcon-7b", falcon, dict(
        architectures=["FalconForCausalLM"], hidden_size=4544, num_hidden_layers=32, num_attention_heads=71, layer_norm_epsilon=1e-5,
        vocab_size=65024)),
    ("stabilityai/stablelm-2-1_6b", stablelm, dict(
        architectures=["StableLmForCausalLM"], hidden_size=2048, intermediate_size=5632, num_hidden_layers=24, num_attention_heads=32,
        num_key_value_heads=32, partial_rotary_factor=0.25, use_qkv_bias=True, use_parallel_residual=False, max_position_embeddings=4096,
        layer_norm_eps=1e-5, rope_theta=10000, vocab_size=100352)),
    ("nvidia/Nemotron-Mini-4B-Instruct", nemotron, dict(
        architectures=["NemotronForCausalLM"], hidden_size=3072, intermediate_size=9216, num_hidden_layers=32, num_attention_heads=24,
        num_key_value_heads=8, head_dim=128, partial_rotary_factor=0.5, hidden_act="relu2", max_position_embeddings=4096, norm_eps=1e-5,
        rope_theta=10000, vocab_size=256000)),
    ("openbmb/MiniCPM3-4B", minicpm3, dict(
        architectures=["MiniCPM3ForCausalLM"], hidden_size=2560, intermediate_size=6400, num_hidden_layers=62, num_attention_heads=40,
        num_key_value_heads=40, q_lora_rank=768, kv_lora_rank=256, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64,
        rope_scaling={"type": "longrope", "long_factor": [1.0] * 16, "short_factor": [1.0] * 16, "original_max_position_embeddings": 32768},
        max_position_embeddings=32768, rms_norm_eps=1e-5, tie_word_embeddings=True, vocab_size=73448)),
    ("mistralai/Mamba-Codestral-7B-v0.1", mamba2, dict(
        architectures=["Mamba2ForCausalLM"], hidden_size=4096, num_hidden_layers=64, num_heads=128, head_dim=64, n_groups=8, state_size=128,
        conv_kernel=4, expand=2, chunk_size=256, layer_norm_epsilon=1e-5, vocab_size=32768)),
    ("internlm/internlm2_5-7b", internlm2, dict(
        architectures=["InternLM2ForCausalLM"], hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=32768, rms_norm_eps=1e-5, rope_theta=1000000, vocab_size=92544)),
]
