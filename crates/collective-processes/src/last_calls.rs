//! Last calls of ranks that a signal ends: their flight recorders are written first.

use std::sync::{Arc, Mutex, Once, PoisonError, Weak};

use fusestep_collective::FlightRecorder;
use signal_hook::iterator::Signals;

use crate::launch::{Disposition, signals_without};

/// Recorders that other threads may write.
static RECORDERS: Mutex<Vec<Weak<Mutex<FlightRecorder>>>> = Mutex::new(Vec::new());

/// Writes this recorder into its folder when a signal ends the process. A signal that the program
/// hears itself, or ignores, is left to it.
pub(crate) fn written_at_end(recorder: &Arc<Mutex<FlightRecorder>>) {
    let mut recorders = RECORDERS.lock().unwrap_or_else(PoisonError::into_inner);
    recorders.retain(|recorder| recorder.strong_count() > 0);
    recorders.push(Arc::downgrade(recorder));
    drop(recorders);
    static WATCHED: Once = Once::new();
    WATCHED.call_once(watch);
}

fn watch() {
    // Without a handler or its thread the recorders are lost at a signal; everything else works.
    let unheard = signals_without(&[Disposition::Ignored, Disposition::Heard]);
    let Ok(mut signals) = Signals::new(unheard) else {
        return;
    };
    let handle = signals.handle();
    let watch = move || {
        for signal in signals.forever() {
            write_all();
            let _ = signal_hook::low_level::emulate_default_handler(signal);
        }
    };
    let named = std::thread::Builder::new().name("fusestep-recorder".to_owned());
    if named.spawn(watch).is_err() {
        handle.close();
    }
}

fn write_all() {
    let recorders = RECORDERS.lock().unwrap_or_else(PoisonError::into_inner).clone();
    for recorder in recorders.iter().filter_map(Weak::upgrade) {
        recorder.lock().unwrap_or_else(PoisonError::into_inner).dump_once();
    }
}
