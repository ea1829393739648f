//! Every kernel has its reference, test, bench, documentation and compiled form under the same
//! stem.

/// Kernels that serve collectives, sums or reports and no optimizer have these for their reference,
/// test and bench. What sums over micro-steps and norms of updates cost is not timed by itself.
const OF_OTHERS: [(&str, &[&str]); 4] = [
    (
        "accumulate",
        &["crates/planner/src/run/memory/absorb.rs", "crates/cuda/tests/every_entry/accumulate.rs"],
    ),
    (
        "rank_order",
        &[
            "tests/collective/numbers.rs",
            "crates/collective-nccl/tests/nccl/rank_order.rs",
            "benches/collective.rs",
        ],
    ),
    (
        "tensor_sums",
        &["crates/planner/src/run/stages/trust.rs", "crates/cuda/tests/every_entry/tensor_sums.rs"],
    ),
    ("update_sums", &["crates/elementwise/src/tally.rs", "crates/cuda/tests/measured.rs"]),
];

/// The bench of every rule that has none of its own.
const BENCH_OF_RULES: &str = "benches/rules.rs";

/// The files of a rule that updates every element on its own: its licences, its page, its
/// definition, its settings with the update of an element, and its entry for slices.
pub(crate) const RULE: [&str; 8] = [
    "Cargo.toml",
    "LICENSE-APACHE",
    "LICENSE-MIT",
    "README.md",
    "src/lib.rs",
    "src/reference.rs",
    "src/rule.rs",
    "src/slices.rs",
];

/// The entry for slices of a rule whose state can be kept in 8 bits.
pub(crate) const CODED: &str = "src/coded.rs";

/// What is missing for the kernel `kernels/<stem>.cu`; `exists` answers for a path, `docs` is the
/// text of `docs/kernels.md`.
pub(crate) fn violations(stem: &str, exists: &dyn Fn(&str) -> bool, docs: &str) -> Vec<String> {
    let dashed = stem.replace('_', "-");
    let parts = match OF_OTHERS.iter().find(|(own, _)| *own == stem) {
        Some((_, parts)) => parts.iter().map(|&part| part.to_owned()).collect(),
        None => {
            let own = format!("benches/{stem}.rs");
            let bench = if exists(&own) { own } else { BENCH_OF_RULES.to_owned() };
            vec![format!("crates/{dashed}/src/reference.rs"), format!("tests/{stem}.rs"), bench]
        }
    };
    let ptx = format!("kernels/ptx/{stem}.ptx");
    let files = parts.into_iter().chain([ptx]);
    let mut found: Vec<String> = files
        .filter(|path| !exists(path))
        .map(|path| format!("kernels/{stem}.cu: expected {path}, found none"))
        .collect();
    let section = format!("## {dashed}");
    if !docs.lines().any(|line| line.trim_end() == section) {
        found.push(format!(
            "kernels/{stem}.cu: expected a section `{section}` in docs/kernels.md, found none"
        ));
    }
    found
}

#[test]
fn each_missing_part_is_named() {
    let docs = "# Kernels\n## fused-adam\n";
    assert_eq!(violations("fused_adam", &|_| true, docs), Vec::<String>::new());
    assert_eq!(violations("fused_sgd", &|_| true, docs).len(), 1);
    let found = violations("fused_adam", &|path| !path.starts_with("benches"), docs);
    assert_eq!(found, ["kernels/fused_adam.cu: expected benches/rules.rs, found none"]);
    assert_eq!(violations("fused_sgd", &|_| false, "").len(), 5);
    assert_eq!(violations("rank_order", &|_| false, "").len(), 5);
    let found = violations("rank_order", &|path| !path.starts_with("tests"), "## rank-order\n");
    assert_eq!(found, ["kernels/rank_order.cu: expected tests/collective/numbers.rs, found none"]);
}
