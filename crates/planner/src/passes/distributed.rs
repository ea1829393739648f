//! Pass `distributed`: parameters of which every rank has a slice of its own.

use super::{ActsOn, Pass};
use crate::{Note, Plan, PlanError, Verdict};

/// Says that these parameters are slices of a layer that is spread over the ranks, another on each: the last layer of a classifier
/// with millions of classes, for example. All ranks name them alike, and slices have one shape.
///
/// Their gradients are not reduced, their values neither broadcast nor averaged, their state is not sharded, and each slice counts
/// once in the norm of all gradients. Checkpoints keep every rank's slice, for as many ranks. With [`crate::Shard::group`] too no two
/// ranks have the same slice: groups share out the other parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Distributed {
    names: Vec<String>,
}

impl Distributed {
    /// The parameters of these names.
    pub fn params(names: impl IntoIterator<Item = impl Into<String>>) -> Self {
        Self {
            names: names.into_iter().map(Into::into).collect(),
        }
    }
}

impl Pass for Distributed {
    fn name(&self) -> &'static str {
        "distributed"
    }

    fn acts_on(&self) -> ActsOn {
        ActsOn::Ranks
    }

    fn apply(&self, plan: &mut Plan) -> Result<(), PlanError> {
        if !plan.ranks.distributed.is_empty() {
            return Err(PlanError::PassTwice { pass: self.name() });
        }
        let mut marked = vec![false; plan.params.len()];
        for name in &self.names {
            let at = plan.params.iter().position(|param| param.name == *name);
            let Some(at) = at else {
                return Err(PlanError::UnknownName {
                    name: name.clone(),
                    parameters: plan.params.len(),
                });
            };
            marked[at] = true;
        }
        let count = marked.iter().filter(|&&marked| marked).count();
        let (verdict, reason) = match plan.ranks.topology.world {
            1 => (
                Verdict::Skipped,
                "a world of 1 rank has every slice".to_owned(),
            ),
            _ => {
                plan.ranks.distributed = marked;
                let reason = format!("{count} parameters are slices that each rank has for itself");
                (Verdict::Applied, reason)
            }
        };
        plan.notes.push(Note::new(self.name(), verdict, reason));
        Ok(())
    }
}
