//! One AdamW step on slices: a kernel crate and nothing else.
#![forbid(unsafe_code)]

use fusestep_fused_adam::{Adam, AdamTensors};

fn main() {
    let (mut w, g, mut m, mut v) = (vec![1.0f32; 3], vec![0.5; 3], vec![0.0; 3], vec![0.0; 3]);
    let tensors = &mut [AdamTensors {
        param: &mut w,
        grad: &g,
        moment1: &mut m,
        moment2: &mut v,
        max_moment2: None,
    }];
    let rule = Adam {
        lr: 0.1,
        ..Adam::default()
    };
    rule.step(1, tensors).expect("slices of one length");
    // The first step moves by lr against the sign of the gradient, after decay by lr · 0.01.
    assert!(w.iter().all(|w| (w - 0.899).abs() < 1e-6), "found {w:?}");
    println!("one kernel: {w:?}");
}
