//! Shapes of slices, which ranks exchange before they plan.

use std::collections::BTreeSet;

use fusestep_tensor::{DType, ParamDesc, Quoted, Shape};

use crate::error::{PlanError, Result};
use crate::plan::passes::distributed::{Distributed, find};
use crate::run::comms::calls::Comms;

impl Distributed {
    /// The parameters of these names with the shapes that ranks tell each other. All ranks call it
    /// with the same names and their own parameters.
    ///
    /// # Errors
    /// On all ranks: [`PlanError::RanksDiffer`] in the names; [`PlanError::UnknownName`] for one
    /// that no rank has a parameter of; [`PlanError::Slices`] for one that a single rank has none
    /// of, or for dtypes that differ; [`PlanError::Collective`].
    /// # Cost
    /// A few small calls.
    pub fn of_ranks(
        names: &BTreeSet<String>,
        params: &[ParamDesc],
        comms: &mut Comms<'_>,
    ) -> Result<Self> {
        comms.compare(&[(Self::FIELD, Self::told(names))])?;
        if comms.world() == 1 || names.is_empty() {
            return Ok(Self::params(names));
        }
        // A name without a parameter is told as well: a rank that left here would be waited for.
        let own = names.iter().map(|name| {
            let param = &params[find(name, params).ok()?];
            Some((param.dtype, param.shape.dims().to_vec()))
        });
        let own: Vec<Slice> = own.collect();
        let text = serde_json::to_string(&own).unwrap_or_default();
        let mut of_ranks: Vec<Vec<Slice>> = Vec::with_capacity(comms.world());
        for (rank, text) in comms.gather_texts(&text)?.iter().enumerate() {
            let read = serde_json::from_str(text).ok();
            let read = read.filter(|of_rank: &Vec<_>| of_rank.len() == names.len());
            of_ranks.push(read.ok_or_else(|| PlanError::Topology {
                expected: format!("a dtype and a shape of each slice from rank {rank}"),
                found: Quoted(text).to_string(),
            })?);
        }
        let mut all = Self::default();
        for (at, name) in names.iter().enumerate() {
            let slices = of_ranks.iter().map(|of_rank| of_rank[at].as_ref());
            all = all.with_shapes(name, shapes_of(name, slices.collect(), params)?);
        }
        Ok(all)
    }
}

/// The dtype and the dimensions of a rank's slice; `None` if the rank has no parameter of the name.
type Slice = Option<(DType, Vec<u64>)>;

/// The shapes of one name's slices, in rank order.
fn shapes_of(
    name: &str,
    of_ranks: Vec<Option<&(DType, Vec<u64>)>>,
    params: &[ParamDesc],
) -> Result<Vec<Shape>> {
    if of_ranks.iter().all(Option::is_none) {
        find(name, params)?;
    }
    let refuse = |expected: String, found: String| {
        Err(PlanError::Slices { name: name.to_owned(), expected, found })
    };
    let mut first = None;
    let mut shapes = Vec::with_capacity(of_ranks.len());
    for (rank, slice) in of_ranks.into_iter().enumerate() {
        let Some((dtype, dims)) = slice else {
            let expected = "a parameter of this name on every rank".to_owned();
            return refuse(expected, format!("none on rank {rank}"));
        };
        let first = *first.get_or_insert(*dtype);
        if *dtype != first {
            return refuse(format!("{first} as on rank 0"), format!("{dtype} on rank {rank}"));
        }
        shapes.push(Shape::new(dims.clone())?);
    }
    Ok(shapes)
}
