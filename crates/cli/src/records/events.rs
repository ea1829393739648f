//! Events for TensorBoard, in a file of records.
//!
//! ```text
//! record   length (8 bytes), CRC of length (4), event, CRC of event (4), all little-endian
//! CRC      CRC-32C, turned right by 15 bits, plus 0xa282ead8
//! event    a protocol buffer: 1 wall time, 2 step, 3 version, 5 summary, 7 session
//! summary  1 value, repeated: 1 tag, 2 number (f32)
//! ```
//! Crates that write this bring an image library and a compiler of protocol buffers for two
//! messages of numbers, so the messages are put together here. Source: TensorFlow's `event.proto`,
//! `summary.proto` and `record_writer.cc`.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use super::told::StepLine;
use crate::train::summary::Epoch;

/// Beginning of a file's name, by which TensorBoard finds it.
pub(super) const NAME: &str = "events.out.tfevents";

/// A file of events.
pub(super) struct Events {
    file: File,
    path: PathBuf,
}

impl Events {
    /// Makes a new file in the folder. Of a run that goes on, TensorBoard forgets what it has seen
    /// beyond `resumed_step`.
    pub(super) fn create(folder: &Path, resumed_step: Option<u64>) -> io::Result<Self> {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let (mut file, mut path) = (None, PathBuf::new());
        // A run that begins within the same second has a file of its own.
        for number in 0u64.. {
            let (second, process) = (since.as_secs(), std::process::id());
            path = folder.join(format!("{NAME}.{second:010}.fusestep.{process}.{number}"));
            match OpenOptions::new().write(true).create_new(true).open(&path) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                opened => {
                    file = Some(opened?);
                    break;
                }
            }
        }
        let Some(file) = file else { return Err(io::ErrorKind::AlreadyExists.into()) };
        let mut events = Self { file, path };
        let mut version = Message::of_now();
        version.bytes(3, b"brain.Event:2");
        events.add(&version)?;
        if let Some(step) = resumed_step {
            let mut session = Message::default();
            session.number(1, 1);
            let mut start = Message::of_now();
            // The first step that is told anew.
            start.number(2, step + 1);
            start.bytes(7, &session.0);
            events.add(&start)?;
        }
        Ok(events)
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Adds the numbers of an update.
    pub(super) fn step(&mut self, line: &StepLine<'_>) -> io::Result<()> {
        let report = &line.report;
        let mut summary = Summary::default();
        let numbers = [
            ("loss", report.loss),
            ("lr", Some(report.lr)),
            ("grad_norm", report.grad_norm),
            ("update_norm", report.update_norm),
            ("loss_scale", report.loss_scale),
            ("skipped", report.loss_scale.or(report.grad_norm).map(|_| report.skipped.into())),
            ("bytes_sent", (report.calls > 0).then_some(report.bytes_sent as f64)),
            ("seconds/model", Some(line.model_seconds)),
            ("seconds/batch", Some(line.batch_seconds)),
        ];
        for (tag, value) in numbers {
            value.into_iter().for_each(|value| summary.add(tag, value));
        }
        for (part, seconds) in report.seconds.iter().flat_map(|seconds| seconds.parts()) {
            summary.add(&format!("seconds/{part}"), seconds);
        }
        if let Some(norms) = &line.update_norms {
            for (name, norm) in norms.names.iter().zip(&norms.norms) {
                summary.add(&format!("update_norm/{name}"), *norm);
            }
        }
        self.numbers(report.step, &summary)
    }

    /// Adds the outcome of an epoch.
    pub(super) fn epoch(&mut self, step: u64, ended: Epoch) -> io::Result<()> {
        let mut summary = Summary::default();
        summary.add("test/loss", ended.test_loss);
        summary.add("test/accuracy", ended.test_accuracy);
        self.numbers(step, &summary)
    }

    fn numbers(&mut self, step: u64, summary: &Summary) -> io::Result<()> {
        let mut event = Message::of_now();
        event.number(2, step);
        event.bytes(5, &summary.0.0);
        self.add(&event)
    }

    /// Adds a record in one call of the system, so that a reader sees it whole.
    fn add(&mut self, event: &Message) -> io::Result<()> {
        let length = (event.0.len() as u64).to_le_bytes();
        let mut record = length.to_vec();
        record.extend(masked_crc(&length).to_le_bytes());
        record.extend(&event.0);
        record.extend(masked_crc(&event.0).to_le_bytes());
        self.file.write_all(&record)
    }
}

/// Numbers of one event.
#[derive(Default)]
struct Summary(Message);

impl Summary {
    fn add(&mut self, tag: &str, number: f64) {
        let mut value = Message::default();
        value.bytes(1, tag.as_bytes());
        value.tag(2, 5);
        value.0.extend((number as f32).to_le_bytes());
        self.0.bytes(1, &value.0);
    }
}

/// A protocol buffer.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    /// An event of this moment.
    fn of_now() -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut event = Self::default();
        event.tag(1, 1);
        event.0.extend(since.as_secs_f64().to_le_bytes());
        event
    }

    /// The head of a field of this wire type: 0 a number, 1 eight bytes, 2 bytes, 5 four bytes.
    fn tag(&mut self, field: u64, wire_type: u64) {
        self.varint(field << 3 | wire_type);
    }

    fn number(&mut self, field: u64, number: u64) {
        self.tag(field, 0);
        self.varint(number);
    }

    fn bytes(&mut self, field: u64, bytes: &[u8]) {
        self.tag(field, 2);
        self.varint(bytes.len() as u64);
        self.0.extend(bytes);
    }

    /// A number in groups of seven bits, the lowest first.
    fn varint(&mut self, mut number: u64) {
        while number >= 0x80 {
            self.0.push(number as u8 | 0x80);
            number >>= 7;
        }
        self.0.push(number as u8);
    }
}

/// The CRC of a record, as it is stored.
fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// CRC-32C (Castagnoli), bit by bit: a step writes a few hundred bytes.
fn crc32c(bytes: &[u8]) -> u32 {
    let mut crc = u32::MAX;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            let low = crc & 1;
            crc >>= 1;
            if low == 1 {
                crc ^= 0x82f6_3b78;
            }
        }
    }
    !crc
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_those_of_castagnoli() {
        // RFC 3720, B.4, and the check value of the CRC catalogue.
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32c(b""), 0);
    }

    #[test]
    fn messages_have_the_bytes_of_protocol_buffers() {
        let mut message = Message::default();
        message.number(1, 150);
        message.bytes(2, b"testing");
        let expected = [&[0x08, 0x96, 0x01, 0x12, 0x07][..], b"testing"].concat();
        assert_eq!(message.0, expected);
    }

    #[test]
    fn files_of_one_second_are_two_and_a_resumed_run_says_where_it_begins() {
        let folder = tempfile::tempdir().unwrap();
        let [first, second] = [None, Some(41)].map(|step| {
            let events = Events::create(folder.path(), step).unwrap();
            events.path().to_owned()
        });
        assert_ne!(first, second);
        let [first, second] = [first, second].map(|path| std::fs::read(path).unwrap());
        assert_eq!(second.len() - first.len(), 8 + 4 + 9 + 2 + 4 + 4);
        assert!(second.windows(6).any(|bytes| bytes == [0x10, 42, 0x3a, 2, 0x08, 1]), "{second:?}");
    }
}
