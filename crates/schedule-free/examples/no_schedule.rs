//! A noisy slope walked down at one rate: where gradients are taken jumps to the end, the average
//! comes to rest, and nobody has to say beforehand how many steps there will be.
//!
//! `cargo run --release -p fusestep-schedule-free --example no_schedule`

use fusestep_schedule_free::{ScheduleFree, ScheduleFreeTensors, StepError};

const LOWEST: f32 = 2.0;

fn main() -> Result<(), StepError> {
    let rule = ScheduleFree { lr: 0.05, warmup_steps: 10, ..ScheduleFree::default() };
    let (mut y, mut moment2, mut z, mut x) = ([0.0f32], [0.0f32], [0.0f32], [0.0f32]);
    let mut noise = 1u32;
    for step in 1..=2000 {
        noise = noise.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let grad = [y[0] - LOWEST + (noise >> 8) as f32 / (1 << 23) as f32 - 1.0];
        let tensor =
            ScheduleFreeTensors { param: &mut y, grad: &grad, moment2: &mut moment2, base: &mut z };
        rule.step(step, &mut [tensor])?;
        if [20, 100, 500, 2000].contains(&step) {
            rule.average(&y, &z, &mut x)?;
            let [base, average] = [z[0] - LOWEST, x[0] - LOWEST];
            println!("step {step}: z is {base:+.3} away, the average {average:+.3}");
        }
    }
    assert!((x[0] - LOWEST).abs() < 0.05, "{x:?}");
    Ok(())
}
