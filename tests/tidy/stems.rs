//! Every kernel has its reference, test, bench, documentation and compiled form under the same stem.

/// What is missing for the kernel `kernels/<stem>.cu`; `exists` answers for a path, `docs` is the text of `docs/kernels.md`.
pub(crate) fn violations(stem: &str, exists: &dyn Fn(&str) -> bool, docs: &str) -> Vec<String> {
    let dashed = stem.replace('_', "-");
    let files = [
        format!("crates/{dashed}/src/reference.rs"),
        format!("tests/{stem}.rs"),
        format!("benches/{stem}.rs"),
        format!("kernels/ptx/{stem}.ptx"),
    ];
    let mut found: Vec<String> = files
        .iter()
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
    assert_eq!(
        violations("fused_adam", &|_| true, docs),
        Vec::<String>::new()
    );
    assert_eq!(violations("fused_sgd", &|_| true, docs).len(), 1);
    let found = violations("fused_adam", &|path| !path.starts_with("benches"), docs);
    assert_eq!(
        found,
        ["kernels/fused_adam.cu: expected benches/fused_adam.rs, found none"]
    );
    assert_eq!(violations("fused_sgd", &|_| false, "").len(), 5);
}
