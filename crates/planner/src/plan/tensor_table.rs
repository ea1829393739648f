//! Table of a plan's tensors for pages: their sizes, and why each lies where it lies.

use std::collections::HashMap;
use std::fmt::Write;
use std::ops::Range;

use fusestep_tensor::{Role, Trust, counted, grouped};

use crate::plan::stage::Stage;
use crate::plan::storage::StorageSpec;
use crate::plan::text::{bytes, escape};
use crate::plan::value::Plan;

/// Rows of the table; models of more tensors are rare.
const MOST: usize = 2_000;

/// Rows that are shown without being asked for.
const SHOWN: usize = 60;

/// Launches that update each tensor, by storage and place in it, numbered as a page draws them.
type LaunchesOf = HashMap<(usize, u32), Range<usize>>;

/// Writes the table.
pub(crate) fn tensor_table(plan: &Plan, page: &mut String) {
    let launches = launches(plan);
    let count = counted(plan.params.len() as u64, "tensor");
    let open = if plan.params.len() <= SHOWN { " open" } else { "" };
    let _ = write!(
        page,
        "<h2>Tensors</h2>\n<details{open}><summary>{count}, with sizes and reasons</summary>\n\
         <div class=\"wide\"><table><tr><th>tensor</th><th>shape</th><th>dtype</th>\
         <th>elements</th><th>parameter</th><th>state</th><th class=\"why\">why it lies there</th></tr>\n"
    );
    for (index, param) in plan.params.iter().enumerate().take(MOST) {
        let (storage, place) = plan.places[index];
        let spec = &plan.storages[storage];
        let numel = param.numel();
        let _ = writeln!(
            page,
            "<tr><td>{}</td><td class=\"k\">{}</td><td>{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td>\
             <td class=\"n\">{}</td><td>{}</td></tr>",
            escape(&param.name),
            escape(&param.shape.to_string()),
            param.dtype,
            grouped(numel),
            bytes(numel * param.dtype.len_bytes() as u64),
            bytes(state_bytes(spec, numel)),
            escape(&reasons(plan, index, launches.get(&(storage, place as u32)))),
        );
    }
    page.push_str("</table></div></details>\n");
    if let Some(more) = plan.params.len().checked_sub(MOST).filter(|more| *more > 0) {
        let _ = writeln!(page, "<p>and {} more tensors</p>", grouped(more as u64));
    }
}

/// Bytes of the rule's own tensors for so many elements.
fn state_bytes(spec: &StorageSpec, numel: u64) -> u64 {
    let own = spec.lists.iter().filter(|list| !matches!(list.role, Role::Param | Role::Grad));
    own.map(|list| list.stride().bytes(numel)).sum()
}

fn launches(plan: &Plan) -> LaunchesOf {
    let (mut found, mut number) = (LaunchesOf::new(), 0);
    for stage in &plan.stages {
        match stage {
            Stage::Norm(norm) => {
                number += norm.reads.iter().map(|read| read.batches.len()).sum::<usize>();
            }
            Stage::Optimize(update) | Stage::ReduceUpdate(update) => {
                for batch in &update.batches {
                    for record in &batch.records {
                        let of = found.entry((update.storage, record.tensor));
                        of.or_insert(number..number).end = number + 1;
                    }
                    number += 1;
                }
            }
            _ => {}
        }
    }
    found
}

/// The tensor's storage, launch and bucket, each with its reason.
fn reasons(plan: &Plan, param: usize, launches: Option<&Range<usize>>) -> String {
    let (storage, place) = plan.places[param];
    let spec = &plan.storages[storage];
    let others = spec.members.len() - 1;
    let mut told = Vec::new();
    told.push(match others {
        0 => format!("storage {storage}, alone"),
        _ => format!(
            "storage {storage} with {} of its kernel and dtype",
            counted(others as u64, "other")
        ),
    });
    let desc = &plan.params[param];
    if spec.rule > 0 {
        told.push("a rule of its own".to_owned());
    }
    if desc.weight_decay == Some(0.0) {
        told.push("no decay".to_owned());
    }
    if desc.trust == Some(Trust::Plain) {
        told.push("at the plain rate".to_owned());
    }
    if spec.distributed {
        told.push("a slice on every rank".to_owned());
    }
    told.push(match launches {
        None if desc.numel() == 0 => "no launch, since it is empty".to_owned(),
        None => "no launch here: another rank updates it".to_owned(),
        Some(of) if of.len() == 1 => format!("launch {}", of.start),
        Some(of) => {
            format!("launches {} to {}: cut where a launch or a bucket ends", of.start, of.end - 1)
        }
    });
    if let Some(segment) = plan
        .segments
        .iter()
        .find(|segment| segment.storage == storage && segment.tensors.contains(&(place as u32)))
    {
        let (buckets, tensors) = (&segment.buckets, segment.tensors.len() as u64);
        told.push(match (buckets.len(), tensors) {
            (1, 1) => format!("bucket {}, alone", buckets.start),
            (1, _) => {
                format!("bucket {}, which {} fill", buckets.start, counted(tensors, "tensor"))
            }
            _ => format!("buckets {} to {}: larger than one", buckets.start, buckets.end - 1),
        });
    }
    told.join("; ")
}

#[cfg(test)]
mod tests {
    use fusestep_fused_adam::Adam;
    use fusestep_tensor::{DType, ParamDesc, Shape};

    use super::*;
    use crate::plan::planner::Planner;

    fn page(sizes: &[(&str, u64, DType)]) -> String {
        let params: Vec<ParamDesc> = sizes
            .iter()
            .map(|(name, numel, dtype)| {
                ParamDesc::new(*name, Shape::new([*numel]).unwrap(), *dtype)
            })
            .collect();
        Planner::new(Adam::default().into()).plan(&params).unwrap().to_html()
    }

    #[test]
    fn every_tensor_has_its_sizes_and_reasons() {
        let sizes = [("a<b", 1_000, DType::F32), ("c", 24, DType::F32), ("d", 7, DType::F64)];
        let page = page(&[&sizes[..], &[("none", 0, DType::F32)]].concat());
        let row = |name: &str| {
            let start = page.find(&format!("<tr><td>{name}</td>")).expect(name);
            page[start..].split("</tr>").next().unwrap().to_owned()
        };
        let first = row("a&lt;b");
        for cell in ["[1000]", "f32", "1,000", "3.9 KiB", "7.8 KiB", "storage 0 with 2 others"] {
            assert!(first.contains(cell), "{cell}: {first}");
        }
        assert!(first.contains("launch 0"), "{first}");
        assert!(row("d").contains("storage 1, alone; launch 1"), "{}", row("d"));
        assert!(row("none").contains("no launch, since it is empty"), "{}", row("none"));
        assert!(page.contains("<details open><summary>4 tensors"), "{page}");
    }

    #[test]
    fn long_tables_are_folded_and_cut() {
        let names: Vec<String> = (0..MOST + 5).map(|at| format!("t{at}")).collect();
        let sizes: Vec<_> = names.iter().map(|name| (name.as_str(), 1, DType::F32)).collect();
        let page = page(&sizes);
        assert!(page.contains("<details><summary>2,005 tensors"), "not folded");
        assert_eq!(page.matches("<tr><td>t").count(), MOST);
        assert!(page.contains("and 5 more tensors"));
    }
}
