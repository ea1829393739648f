use std::fmt;

/// The properties of a CUDA device and its driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Number of the device, from 0.
    pub ordinal: u32,
    /// The device's own name.
    pub name: String,
    /// Compute capability, major and minor.
    pub compute_capability: (u32, u32),
    /// The newest CUDA version that the driver supports, major and minor.
    pub driver_version: (u32, u32),
    /// Memory in bytes, free or not.
    pub memory_bytes: u64,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Bytes of the cache that all multiprocessors share.
    pub l2_bytes: u64,
    /// Most by-value argument bytes of one launch.
    pub argument_bytes: usize,
}

impl fmt::Display for DeviceInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (major, minor) = self.compute_capability;
        let (driver_major, driver_minor) = self.driver_version;
        write!(
            f,
            "{}: {}, compute capability {major}.{minor}, driver for CUDA \
             {driver_major}.{driver_minor}, {} MiB, {} multiprocessors, {} argument bytes",
            self.ordinal,
            self.name,
            self.memory_bytes >> 20,
            self.multiprocessors,
            self.argument_bytes
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_described_on_one_line() {
        let info = DeviceInfo {
            ordinal: 1,
            name: "Some GPU".to_owned(),
            compute_capability: (9, 0),
            driver_version: (12, 4),
            memory_bytes: 3 << 30,
            multiprocessors: 132,
            l2_bytes: 50 << 20,
            argument_bytes: 32_764,
        };
        assert_eq!(
            info.to_string(),
            "1: Some GPU, compute capability 9.0, driver for CUDA 12.4, 3072 MiB, 132 \
             multiprocessors, 32764 argument bytes"
        );
    }
}
