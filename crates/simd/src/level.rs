//! Instruction sets that loops are compiled for.

use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;

#[cfg(target_arch = "x86_64")]
use crate::avx2_codec::Avx2Codec;
#[cfg(target_arch = "x86_64")]
use crate::avx512_codec::Avx512Codec;
use crate::codec::{CodedWork, PortableCodec};
#[cfg(target_arch = "x86_64")]
use crate::features::{Avx2, Avx512};

/// An instruction set that kernel loops are compiled for; holding one proves that this processor
/// has it.
#[derive(Clone, Copy, Debug)]
pub struct Level(Kind);

#[derive(Clone, Copy, Debug)]
enum Kind {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512),
    /// NEON, a part of every aarch64 processor.
    #[cfg(target_arch = "aarch64")]
    Neon,
}

impl Level {
    /// The baseline of the compilation target; every processor has it.
    pub const PORTABLE: Level = Level(Kind::Portable);

    /// The widest level of this processor.
    pub fn detect() -> Self {
        static WIDEST: OnceLock<Level> = OnceLock::new();
        *WIDEST.get_or_init(|| Self::available().pop().unwrap_or(Self::PORTABLE))
    }

    /// All levels of this processor, narrowest first.
    pub fn available() -> Vec<Self> {
        let mut levels = vec![Self::PORTABLE];
        #[cfg(target_arch = "x86_64")]
        {
            levels.extend(Avx2::detect().map(|avx2| Level(Kind::Avx2(avx2))));
            levels.extend(Avx512::detect().map(|avx512| Level(Kind::Avx512(avx512))));
        }
        #[cfg(target_arch = "aarch64")]
        levels.push(Level(Kind::Neon));
        levels
    }

    /// The level's name: `portable`, `avx2`, `avx512` or `neon`.
    pub fn name(self) -> &'static str {
        match self.0 {
            Kind::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2(_) => "avx2",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512(_) => "avx512",
            #[cfg(target_arch = "aarch64")]
            Kind::Neon => "neon",
        }
    }

    /// Whether this is [`Self::PORTABLE`].
    pub fn is_portable(self) -> bool {
        matches!(self.0, Kind::Portable)
    }

    /// Bytes of the level's vectors. A level of 64 bytes proves that the processor has AVX-512F, a
    /// level of 32 bytes that it has AVX. Only `available` makes these levels, where it has found
    /// both.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    pub(crate) fn vector_bytes(self) -> usize {
        match self.0 {
            Kind::Portable => 16,
            Kind::Avx2(_) => 32,
            Kind::Avx512(_) => 64,
        }
    }

    /// Calls `body` compiled for this level; code that is to profit must be inlined into `body`.
    ///
    /// The bits do not depend on the level: Rust neither contracts nor reassociates floating-point
    /// operations.
    #[inline(always)]
    pub fn run<R>(self, body: impl FnOnce() -> R) -> R {
        self.run_compiled(true, body)
    }

    /// [`Self::run`] for a loop whose running values fill the registers. `many` is for the 2 KiB of
    /// registers of AVX-512, `few` for the 512 bytes or less of other levels.
    #[cfg_attr(not(target_arch = "x86_64"), expect(unused_variables, reason = "for AVX-512"))]
    #[inline(always)]
    pub fn run_in_registers<R>(self, many: impl FnOnce() -> R, few: impl FnOnce() -> R) -> R {
        match self.0 {
            Kind::Portable => few(),
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2(avx2) => avx2.run(few),
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512(avx512) => avx512.run(many),
            #[cfg(target_arch = "aarch64")]
            Kind::Neon => few(),
        }
    }

    /// Runs work on coded groups, compiled for this level and with the level's own codec.
    #[inline(always)]
    pub fn run_coded<W: CodedWork>(self, work: W) -> W::Output {
        match self.0 {
            Kind::Portable => work.run(PortableCodec),
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2(avx2) => avx2.run(
                #[inline(always)]
                || work.run(Avx2Codec::new(avx2)),
            ),
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512(avx512) => avx512.run(
                #[inline(always)]
                || work.run(Avx512Codec::new(avx512)),
            ),
            #[cfg(target_arch = "aarch64")]
            Kind::Neon => work.run(PortableCodec),
        }
    }

    /// [`Self::run`] for a body that is compiled for [`Self::PORTABLE`] only if the constant
    /// `portable` is true. A portable body that nobody runs would be half of a kernel's code.
    ///
    /// # Panics
    /// If the level is portable and `portable` is false.
    #[inline(always)]
    pub fn run_compiled<R>(self, portable: bool, body: impl FnOnce() -> R) -> R {
        match self.0 {
            Kind::Portable if portable => body(),
            Kind::Portable => panic!("expected a level above {self} for a body compiled for those"),
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2(avx2) => avx2.run(body),
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512(avx512) => avx512.run(body),
            #[cfg(target_arch = "aarch64")]
            Kind::Neon => body(),
        }
    }
}

impl Default for Level {
    fn default() -> Self {
        Self::detect()
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Level {
    type Err = LevelError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let available = Self::available();
        available.iter().find(|level| level.name() == text).copied().ok_or_else(|| LevelError {
            found: text.to_owned(),
            expected: available.iter().map(|level| level.name()).collect(),
        })
    }
}

/// A level this processor does not have.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("simd level `{found}`: expected one of {expected:?} on this processor")]
pub struct LevelError {
    /// The name that was asked for.
    pub found: String,
    /// The names of this processor's levels.
    pub expected: Vec<&'static str>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_named_and_run() {
        for level in Level::available() {
            assert_eq!(level.name().parse::<Level>().unwrap().name(), level.name());
            assert_eq!(level.run(|| 20 + 22), 42);
        }
        assert!("sse9".parse::<Level>().is_err());
    }
}
