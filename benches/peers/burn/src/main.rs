//! burn's AdamW for `fusestep bench --peers`, which starts this program and talks to it by lines:
//! see `crates/cli/src/peers/worker.rs` for what is sent and expected.
#![forbid(unsafe_code)]

use std::error::Error;
use std::io::{self, BufRead, Write};
use std::time::Instant;

use burn::optim::{AdamW, AdamWConfig, Optimizer};
use burn::tensor::{Device, Tensor};
use serde_json::{Value, json};

const VERSION: &str = "0.22";
const MIN_SAMPLE_NS: u128 = 4_000_000;

type State = <AdamW as Optimizer>::State<1>;

/// A parameter, flat, as burn keeps it between steps.
struct Param {
    value: Option<Tensor<1>>,
    grad: Tensor<1>,
    state: Option<State>,
}

struct Peer {
    optimizer: AdamW,
    lr: f64,
    params: Vec<Param>,
    calls: u64,
    steps: u64,
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut lines = io::stdin().lock().lines();
    let request: Value = serde_json::from_str(&lines.next().ok_or("no request")??)?;
    let threads = request["threads"].as_u64().unwrap_or(1) as usize;
    rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .build_global()?;
    let mut peer = Peer::new(&request);
    say(&json!({"found": [{"name": "burn AdamW", "version": VERSION}], "absent": []}))?;
    for line in lines {
        line?;
        say(&peer.sample())?;
    }
    Ok(())
}

fn say(answer: &Value) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{answer}")?;
    out.flush()
}

impl Peer {
    fn new(request: &Value) -> Self {
        let number = |key: &str| request[key].as_f64().unwrap_or(0.0);
        let device = Device::default();
        let shapes = request["params"].as_array().into_iter().flatten();
        let params = shapes.map(|entry| {
            let dims = entry["shape"].as_array().into_iter().flatten();
            let numel: usize = dims.map(|dim| dim.as_u64().unwrap_or(1) as usize).product();
            Param {
                value: Some(Tensor::full([numel], 0.1, &device)),
                grad: Tensor::full([numel], 0.01, &device),
                state: None,
            }
        });
        let mut peer = Self {
            optimizer: AdamWConfig::new()
                .with_beta_1(number("beta1") as f32)
                .with_beta_2(number("beta2") as f32)
                .with_epsilon(number("eps") as f32)
                .with_weight_decay(number("weight_decay") as f32)
                .build(),
            lr: number("lr"),
            params: params.collect(),
            calls: 1,
            steps: 0,
        };
        // What is allocated by the first step is not part of any other.
        peer.step();
        peer
    }

    fn step(&mut self) {
        for param in &mut self.params {
            let value = param.value.take().expect("put back below");
            let (grad, state) = (param.grad.clone(), param.state.take());
            let (value, state) = self.optimizer.step(self.lr, value, grad, state);
            (param.value, param.state) = (Some(value), state);
        }
        self.steps += 1;
    }

    fn sample(&mut self) -> Value {
        loop {
            let start = Instant::now();
            for _ in 0..self.calls {
                self.step();
            }
            let spent = start.elapsed().as_nanos();
            if spent >= MIN_SAMPLE_NS || self.calls >= 1 << 20 {
                let ns = spent as f64 / self.calls as f64;
                return json!({"ns": ns, "steps": self.steps, "value": self.value()});
            }
            self.calls *= 2;
        }
    }

    fn value(&self) -> Option<f32> {
        let values = self.params.iter().filter_map(|param| param.value.as_ref());
        let first = values.into_iter().find(|value| value.dims()[0] > 0)?;
        Some(first.clone().slice([0..1]).into_scalar())
    }
}
