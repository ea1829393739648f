//! What planning costs: once per run, linear in the parameters.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use fusestep_fused_adam::Adam;
use fusestep_launch::{ARGUMENT_BYTES_CLASSIC, ARGUMENT_BYTES_LARGE, LaunchLimits};
use fusestep_planner::{Optimizer, Planner};

#[path = "support/shapes.rs"]
mod shapes;
#[path = "support/timing.rs"]
mod timing;

use shapes::{model, tiny};
use timing::group;

fn planning(criterion: &mut Criterion) {
    let mut group = group(criterion, "planning");
    for set in [model("resnet50"), model("gpt2"), tiny()] {
        group.throughput(Throughput::Elements(set.params.len() as u64));
        for argument_bytes in [ARGUMENT_BYTES_LARGE, ARGUMENT_BYTES_CLASSIC] {
            let planner = Planner::new(Optimizer::Adam(Adam::default()))
                .limits(LaunchLimits::with_argument_bytes(argument_bytes));
            let plan = planner.plan(&set.params).expect("a valid set");
            assert_eq!(plan.elements(), set.elements());
            assert!(plan.launches() < set.params.len());
            group.bench_function(BenchmarkId::new(set.name, argument_bytes), |b| {
                b.iter(|| planner.plan(&set.params));
            });
        }
    }
    group.finish();
}

criterion_group!(benches, planning);
criterion_main!(benches);
