//! Words and texts that ranks tell each other, in rank order.

use fusestep_collective::{Operation, ReduceOp};
use fusestep_tensor::DType;

use crate::error::Result;
use crate::run::comms::calls::Comms;

impl Comms<'_> {
    /// Whether `own` is true on any rank. All ranks call it.
    ///
    /// # Errors
    /// [`crate::PlanError::Collective`].
    /// # Cost
    /// One reduction of a byte.
    pub fn on_any_rank(&mut self, own: bool) -> Result<bool> {
        if self.world() == 1 {
            return Ok(own);
        }
        let mut any = [u8::from(own)];
        self.in_place(Operation::AllReduce(ReduceOp::Max), DType::U8, None, &mut any)?;
        Ok(any[0] != 0)
    }

    /// Replaces the bytes of all ranks by those of rank `root`. All ranks call it with as many.
    ///
    /// # Errors
    /// [`crate::PlanError::Collective`].
    pub fn broadcast_bytes(&mut self, root: usize, bytes: &mut [u8]) -> Result<()> {
        Ok(self.in_place(Operation::Broadcast { root }, DType::U8, None, bytes)?)
    }

    /// Gathers the bytes of each rank on all ranks; each rank has equally many.
    ///
    /// # Errors
    /// [`crate::PlanError::Collective`].
    pub fn gather_bytes(&mut self, own: &[u8]) -> Result<Vec<u8>> {
        let mut all = own.repeat(self.world());
        let counts = vec![own.len(); self.world()];
        self.in_place(Operation::AllGather, DType::U8, Some(&counts), &mut all)?;
        Ok(all)
    }

    /// Gathers a text of each rank on all ranks, in rank order.
    ///
    /// # Errors
    /// [`crate::PlanError::Collective`].
    pub fn gather_texts(&mut self, own: &str) -> Result<Vec<String>> {
        let (rank, world) = (self.rank(), self.world());
        if world == 1 {
            return Ok(vec![own.to_owned()]);
        }
        let lengths = self.gather_bytes(&(own.len() as u64).to_le_bytes())?;
        let lengths = lengths.as_chunks::<8>().0.iter();
        let counts: Vec<usize> = lengths.map(|len| u64::from_le_bytes(*len) as usize).collect();
        let mut texts = vec![0u8; counts.iter().sum()];
        if !texts.is_empty() {
            let first: usize = counts[..rank].iter().sum();
            texts[first..first + own.len()].copy_from_slice(own.as_bytes());
            self.in_place(Operation::AllGather, DType::U8, Some(&counts), &mut texts)?;
        }
        let mut rest = &texts[..];
        let text = |count: usize| {
            let (text, behind) = rest.split_at(count);
            rest = behind;
            String::from_utf8_lossy(text).into_owned()
        };
        Ok(counts.into_iter().map(text).collect())
    }
}
