//! Embeddings of tokens: `x = norm(embedding[token] * scale + token_type + position_embedding[position])`.

use alloc::sync::Arc;

use super::EmbeddingConfig;
use crate::error::LoadError;
use crate::kernels::elementwise::{add_scaled, scale};
use crate::kernels::panel::Matrix;
use crate::model::linear::Norm;
use crate::model::memory::{Size, Stack};
use crate::model::pass::{Pass, Run};
use crate::model::tensors::{Declared, Loaded, Name, NormName, any_width, matrix, vector};

pub(crate) const TABLE: Name = Name::weight("token_embd");
const POSITIONS: Name = Name::weight("position_embd");
const TOKEN_TYPES: Name = Name::weight("token_types");
const NORM: NormName = NormName("token_embd_norm");

/// Weights of the embeddings.
pub(crate) struct TokenEmbeddings {
    /// (n_vocab, n_embd)
    pub(crate) table: Arc<Matrix>,
    /// Whether the table is that of another model.
    pub(crate) is_shared: bool,
    /// (token types, n_embd): the first row is added to every token (BERT).
    token_types: Option<Matrix>,
    /// Learned position embeddings (n_ctx_train, n_embd), for models without RoPE.
    positions: Option<Matrix>,
    /// Norm of the sum (n_embd).
    norm: Option<Norm>,
}

impl TokenEmbeddings {
    /// Declares the tensors of a model of width `d` with `n_vocab` tokens and contexts of `n_ctx`.
    pub(crate) fn tensors(t: &mut Declared<'_>, c: &EmbeddingConfig, (d, n_vocab, n_ctx): (usize, usize, usize)) {
        t.required(TABLE, matrix(n_vocab, d));
        if c.learned_positions {
            t.required(POSITIONS, matrix(n_ctx, d));
        }
        // a row per token type; the first is used
        t.optional_by(TOKEN_TYPES, move |dims| matrix(any_width(dims[1]), d));
        t.optional(NORM.weight(), vector(d));
        t.optional(NORM.bias(), vector(d));
    }

    pub(crate) fn load(t: &mut Loaded<'_>, c: &EmbeddingConfig, d: usize) -> Result<TokenEmbeddings, LoadError> {
        Ok(TokenEmbeddings {
            table: Arc::new(t.matrix(TABLE)?),
            is_shared: false,
            token_types: t.optional_matrix(TOKEN_TYPES),
            positions: if c.learned_positions { Some(t.matrix(POSITIONS)?) } else { None },
            norm: t.norm(NORM)?.or_else(|| c.plain_norm.then(|| Norm::plain(d))),
        })
    }

    /// The table alone; `is_shared` if it is that of another model.
    pub(crate) fn of_table(table: Arc<Matrix>, is_shared: bool) -> TokenEmbeddings {
        TokenEmbeddings { table, is_shared, token_types: None, positions: None, norm: None }
    }

    /// The matrices that no other model has.
    pub(crate) fn matrices(&self) -> impl Iterator<Item = &Matrix> {
        let own = [&*self.table].into_iter().filter(|_| !self.is_shared);
        own.chain(&self.token_types).chain(&self.positions)
    }

    /// Floats of a row of another table.
    fn parts(&self, d: usize) -> [usize; 1] {
        [if self.token_types.is_some() || self.positions.is_some() { d } else { 0 }]
    }

    /// Temporaries of a model of width `d`.
    pub(crate) fn size(&self, d: usize) -> Size {
        Size::rows(1, self.parts(d))
    }

    /// The residual stream `x` before the first layer.
    pub(crate) fn run(
        &self,
        pass: &Pass<'_, '_>,
        c: &EmbeddingConfig,
        runs: &[Run<'_>],
        x: &mut [f32],
        stack: &mut Stack<'_>,
    ) {
        let (d, cpu) = (pass.d, pass.rows.cpu);
        let mut stack = stack.scope();
        let [row] = stack.rows(1, self.parts(d));
        let tokens = runs.iter().flat_map(|r| r.tokens.iter().enumerate().map(|(i, token)| (*token, r.pos + i)));
        for ((token, pos), x) in tokens.zip(x.chunks_exact_mut(d)) {
            self.table.row(token as usize, x);
            if c.scale != 1.0 {
                scale(cpu, x, c.scale);
            }
            let kind = self.token_types.as_ref().map(|types| (types, 0));
            let position = self.positions.as_ref().map(|positions| (positions, pos));
            for (matrix, at) in kind.into_iter().chain(position) {
                matrix.row(at, row);
                add_scaled(cpu, x, row, 1.0);
            }
        }
        if let Some(norm) = &self.norm {
            pass.rows.norm_each(norm, x);
        }
    }
}
