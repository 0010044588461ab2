//! Attention over keys and values: what all kinds of it have in common, and the usual kind.

pub(crate) mod batch;
pub(crate) mod config;
pub(crate) mod distances;
pub(crate) mod forward;
pub(crate) mod heads;
pub(crate) mod latent_heads;
pub(crate) mod layers;
pub(crate) mod rope;
pub(crate) mod rotary;
pub(crate) mod weights;

pub use config::{AttentionConfig, LayerAttention, OutputGate};
pub use distances::DistanceConfig;
pub use heads::{HeadConfig, TemperatureConfig};
pub use latent_heads::LatentHeads;
