//! The command line's training, with a device for each rank.

use std::path::Path;
use std::process::Command;

use crate::worlds::gpus;

const ON_GPUS: [&str; 4] = ["--backend", "cuda", "--engine", "nccl"];

/// The hash of the parameters that a short training ends with.
fn trained(arguments: &[&str]) -> String {
    let libraries = ["FUSESTEP_CUDA_LIBRARY", "FUSESTEP_NCCL_LIBRARY"];
    let folders = libraries.iter().filter_map(|name| {
        let path = std::env::var_os(name)?;
        Path::new(&path).parent().map(Path::to_owned)
    });
    let output = Command::new(env!("CARGO_BIN_EXE_fusestep"))
        .args(["train", "--batch", "256", "--json"])
        .args(arguments)
        .env("LD_LIBRARY_PATH", std::env::join_paths(folders).unwrap())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {text}");
    let told: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(told["steps"].as_u64().unwrap() > 3, "{told}");
    let on_device = arguments.contains(&"cuda");
    assert_eq!(told["backend"], if on_device { "cuda" } else { "cpu" });
    told["params_hash"].as_str().unwrap().to_owned()
}

#[test]
fn a_model_trained_on_devices_has_the_parameters_of_threads() {
    let ranks = gpus().min(3).to_string();
    for (optimizer, zero) in
        [("adamw", "0"), ("adamw", "1"), ("adamw", "2"), ("adamw", "3"), ("lamb", "1")]
    {
        let asked = ["--epochs", "1", "--clip-norm", "0.5", "--ranks", &ranks];
        let asked = [&asked[..], &["--optimizer", optimizer, "--zero", zero]].concat();
        let expected = trained(&asked);
        assert_eq!(trained(&[&asked[..], &ON_GPUS].concat()), expected);
        // Ranks of one device, whose calls go through the host.
        let shared = [&asked[..], &ON_GPUS[..2]].concat();
        assert_eq!(trained(&shared), expected, "{optimizer}, zero {zero}");
    }
    let alone = ["--epochs", "1", "--clip-norm", "0.5"];
    let expected = trained(&alone);
    assert_eq!(trained(&[&alone[..], &ON_GPUS[..2]].concat()), expected);
    // So few bytes of arguments that a table in the device's memory is chosen.
    let cut = [&alone[..], &ON_GPUS[..2], &["--argument-bytes", "200"]].concat();
    assert_eq!(trained(&cut), expected);
    for tables in ["arguments", "resident"] {
        assert_eq!(trained(&[&cut[..], &["--tables", tables]].concat()), expected, "{tables}");
    }
}

#[test]
fn what_devices_have_saved_the_host_goes_on_with() {
    let folder = std::env::temp_dir().join(format!("fusestep-on-gpus-{}", std::process::id()));
    let ranks = gpus().min(2).to_string();
    let of_ranks = ["--ranks", &ranks, "--zero", "1"];
    let saved = ["--checkpoint", folder.to_str().unwrap()];
    trained(&[&of_ranks[..], &saved, &ON_GPUS, &["--epochs", "1"]].concat());
    let resumed = trained(&[&of_ranks[..], &saved, &["--resume", "--epochs", "2"]].concat());
    std::fs::remove_dir_all(&folder).unwrap();
    assert_eq!(resumed, trained(&[&of_ranks[..], &["--epochs", "2"]].concat()));
}
