//! One rank's parameters on all ranks: how a run starts from one file.

use fusestep_collective::Operation;
use fusestep_launch::Backend;
use fusestep_tensor::Role;

use super::comms::Comms;
use super::words::Words;
use super::{Held, RankPlan, RankState};
use crate::PlanError;
use crate::passes::{FuseAllReduce, Zero};

impl RankPlan {
    /// Brings the parameters of rank `root` to all ranks, before the first step: many in one call, as many bytes at once as a bucket
    /// has. Below ZeRO stage 3 only, where a rank has parameters to give.
    ///
    /// # Errors
    /// [`PlanError::InShards`]; [`PlanError::Collective`]; [`PlanError::Backend`].
    pub fn broadcast_params(
        &self,
        state: &mut RankState,
        backend: &dyn Backend,
        comms: &mut Comms<'_>,
        root: usize,
    ) -> Result<(), PlanError> {
        self.check_state(state)?;
        if let (Zero::Zero3, Some(first)) = (self.zero(), self.params().first()) {
            return Err(PlanError::InShards {
                name: first.name.clone(),
            });
        }
        comms.set_plan(self.hash());
        let options = &self.whole.ranks;
        let of_buckets = options.fuse.as_ref().map(|fuse| fuse.cap_bytes);
        let cap_bytes = options.broadcast_cap_bytes.or(of_buckets);
        let cap_bytes = cap_bytes.unwrap_or(FuseAllReduce::DEFAULT_CAP_BYTES);
        for flat in self.flats.iter().filter(|flat| flat.held == Held::Together) {
            let width = flat.dtype.len_bytes();
            let mut words = Words::zeroed(flat.total() as usize * width);
            let place =
                |at: usize| flat.starts[at] as usize * width..flat.starts[at + 1] as usize * width;
            if comms.rank() == root {
                for (at, &member) in flat.members.iter().enumerate() {
                    let name = &self.params()[member as usize].name;
                    self.read_param(state, backend, name, &mut words.bytes_mut()[place(at)])?;
                }
            }
            let cap = (usize::try_from(cap_bytes).unwrap_or(usize::MAX) / width).max(1) * width;
            for part in words.bytes_mut().chunks_mut(cap) {
                comms.in_place(Operation::Broadcast { root }, flat.dtype, None, part)?;
            }
            for (at, &member) in flat.members.iter().enumerate() {
                let name = &self.params()[member as usize].name;
                self.write_whole(state, backend, Role::Param, name, &words.bytes()[place(at)])?;
            }
        }
        Ok(())
    }
}
