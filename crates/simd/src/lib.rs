#![doc = include_str!("../README.md")]
#![deny(unsafe_op_in_unsafe_fn)]

#[cfg(target_arch = "x86_64")]
mod avx2_codec;
#[cfg(target_arch = "x86_64")]
mod avx512_codec;
mod codec;
mod copy;
#[cfg(target_arch = "x86_64")]
mod features;
#[cfg(any(test, feature = "rayon"))]
mod handed;
mod level;
mod narrow;
mod notifier;
mod patience;
mod pool;
#[cfg(test)]
mod pool_tests;
mod prefetch;
#[cfg(any(test, feature = "rayon"))]
mod rayon_team;
mod stream;
mod sync;

pub use codec::{
    CODED_GROUP, CODED_PAIR, Codec, CodedWork, PortableCodec, decode_positive, decode_signed,
    encode_positive, encode_signed, factor_of,
};
pub use copy::{StreamingCopies, copy_bytes, streaming};
pub use level::{Level, LevelError};
pub use narrow::{
    join_bf16, join_bf16_24, narrow_bf16, narrow_bf16_at_random, narrow_bf16_pair,
    narrow_bf16_pair_at_random, narrow_f16, split_bf16, split_bf16_24, widen_bf16, widen_bf16_pair,
    widen_f16,
};
pub use notifier::Notifier;
pub use patience::{Patience, Polling};
pub use pool::{MAX_SHARED, MAX_THREADS, Order, Pool, Split, Team};
pub use prefetch::{fetches_by_itself, prefetch_ahead, prefetch_bytes, prefetch_memory};
#[cfg(any(test, feature = "rayon"))]
pub use rayon_team::start_workers;
pub use stream::{MAX_WRITTEN, PREFETCH_DISTANCES, stream};
