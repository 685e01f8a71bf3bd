//! Tests of the segment store: what is put comes back, and nothing else ever does.

use super::*;

fn shard(n: u64, put_id: u64, len: usize) -> (ShardId, Vec<u8>, Vec<u8>) {
    let mut key = [0; 16];
    key[..8].copy_from_slice(&n.to_le_bytes());
    key[8..].copy_from_slice(&n.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    let data: Vec<u8> =
        (0..len).map(|at| (at as u64).wrapping_mul(n * 7 + put_id * 13 + 1) as u8).collect();
    let mut header = vec![0; SHARD_HEADER_BYTES];
    header[..4].copy_from_slice(b"DKSH");
    header[4] = 1;
    header[12..16].copy_from_slice(&(len as u32).to_le_bytes());
    header[24..40].copy_from_slice(&key);
    header[56..64].copy_from_slice(&put_id.to_le_bytes());
    header[64..68].copy_from_slice(&(n as u32).to_le_bytes());
    header[68..72].copy_from_slice(&crc::crc32c(&data).to_le_bytes());
    let crc = crc::crc32c(&header[..124]);
    header[124..].copy_from_slice(&crc.to_le_bytes());
    (ShardId { key, shard: 0, put_id }, header, data)
}

struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Dir {
        let path =
            std::env::temp_dir().join(format!("pelagos-segment-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        Dir(path)
    }

    fn open(&self) -> Store {
        Store::open(&self.0, 8192, 8 * 8192, 4).unwrap()
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn put(store: &Store, n: u64) -> ShardId {
    let (id, header, data) = shard(n, 1, 5_000);
    store.put(&[&header, &data]).unwrap();
    id
}

fn is_right(store: &Store, n: u64) -> bool {
    let (id, header, data) = shard(n, 1, 5_000);
    match store.get_shard(&id) {
        Ok(bytes) => {
            assert_eq!(bytes, [header, data].concat(), "wrong bytes for {n}");
            true
        }
        Err(_) => false,
    }
}

#[test]
fn what_is_put_comes_back_also_after_a_restart() {
    let dir = Dir::new("restart");
    let store = dir.open();
    for n in 0..20 {
        put(&store, n);
    }
    store.delete(&[shard(3, 1, 1).0]).unwrap();
    store.sync().unwrap();
    for n in 20..25 {
        put(&store, n);
    }
    drop(store);
    let store = dir.open();
    assert_eq!(store.recovery, Recovery { num_shards: 24, num_torn: 0, was_rebuilt: false });
    assert!((0..25).all(|n| is_right(&store, n) == (n != 3)));
    let (mut head, mut body) = ([0; 100], [0; 4_900]);
    store.get(&shard(7, 1, 1).0, &mut head, &mut body, true).unwrap();
    assert_eq!([&head[..], &body[..]].concat(), shard(7, 1, 5_000).2);
}

#[test]
fn the_capacity_is_a_bound_on_the_disk() {
    let dir = Dir::new("capacity");
    let store = dir.open();
    for n in 0..32 {
        put(&store, n);
    }
    let (_, header, data) = shard(32, 1, 5_000);
    assert!(matches!(store.put(&[&header, &data]), Err(StoreError::Full)));
    let on_disk: u64 = std::fs::read_dir(&dir.0)
        .unwrap()
        .map(|file| file.unwrap().metadata().unwrap().len())
        .sum();
    assert!(on_disk <= 4 * 8 * 8192 + 64 * LOG_RECORD as u64);
    store.delete(&[shard(5, 1, 1).0]).unwrap();
    put(&store, 32);
    assert!(is_right(&store, 32) && !is_right(&store, 5));
}

#[test]
fn a_lost_or_damaged_log_is_rebuilt_from_the_headers() {
    let dir = Dir::new("rebuild");
    let store = dir.open();
    for n in 0..10 {
        put(&store, n);
    }
    drop(store);
    std::fs::remove_file(dir.0.join("index.log")).unwrap();
    let store = dir.open();
    assert_eq!(store.recovery, Recovery { num_shards: 10, num_torn: 0, was_rebuilt: true });
    assert!((0..10).all(|n| is_right(&store, n)));
}

#[test]
fn torn_slots_after_the_last_sync_are_freed_at_opening() {
    let dir = Dir::new("torn");
    let store = dir.open();
    put(&store, 0);
    store.sync().unwrap();
    put(&store, 1);
    put(&store, 2);
    drop(store);
    // Slot 2 never reached the disk in full.
    let file = OpenOptions::new().write(true).open(segment_path(&dir.0, 0)).unwrap();
    file.write_all_at(&[0; 4_000], 2 * 8192 + 1_000).unwrap();
    let store = dir.open();
    assert_eq!(store.recovery, Recovery { num_shards: 2, num_torn: 1, was_rebuilt: false });
    assert!(is_right(&store, 0) && is_right(&store, 1) && !is_right(&store, 2));
}

#[test]
fn a_slot_with_new_owner_bytes_is_a_miss_for_the_old_one() {
    let dir = Dir::new("reuse");
    let store = dir.open();
    let id = put(&store, 1);
    // The disk got the next owner's bytes, its log entry and our deletion were lost.
    let (_, header, data) = shard(9, 1, 5_000);
    let file = OpenOptions::new().write(true).open(segment_path(&dir.0, 0)).unwrap();
    file.write_all_at(&[header, data].concat(), 0).unwrap();
    assert_eq!(store.get_shard(&id), Err(Miss::Header));
    let (bad, checked, _) = store.scrub(0, 32).unwrap();
    assert_eq!((bad, checked), (vec![(id, Miss::Header)], 1));
    assert_eq!(store.stat().num_used, 0);
}

#[test]
fn ur_42_missing_and_short_segments_are_misses() {
    let dir = Dir::new("missing");
    let store = dir.open();
    for n in 0..16 {
        put(&store, n);
    }
    OpenOptions::new()
        .write(true)
        .open(segment_path(&dir.0, 0))
        .unwrap()
        .set_len(3 * 8192)
        .unwrap();
    assert_eq!((0..16).filter(|n| is_right(&store, *n)).count(), 3 + 8);
    drop(store);
    std::fs::remove_file(segment_path(&dir.0, 1)).unwrap();
    let store = dir.open();
    assert_eq!((0..16).filter(|n| is_right(&store, *n)).count(), 3);
    for n in 100..110 {
        put(&store, n);
    }
    assert!((100..110).all(|n| is_right(&store, n)));
}

#[test]
fn compaction_bounds_the_log_and_numbers_stay_in_order() {
    let dir = Dir::new("compact");
    let store = dir.open();
    let mut last = 0;
    for n in 0..6_000 {
        let (id, header, data) = shard(n, 1, 100);
        let number = store.put(&[&header, &data]).unwrap();
        assert!(number > last || n == 0);
        last = number;
        store.delete(&[id]).unwrap();
        assert!(store.stat().num_log_records <= 4096 + 8);
    }
    assert!(store.sync().unwrap() > last);
}

#[test]
fn two_processes_cannot_open_one_directory() {
    let dir = Dir::new("lock");
    let _store = dir.open();
    assert!(matches!(Store::open(&dir.0, 8192, 8 * 8192, 4), Err(StoreError::Io(_))));
}

/// Damage of every kind at seeded places: what is read is right or a miss (T-CRASH).
#[test]
fn t_crash_random_truncation_and_flips_never_give_wrong_bytes() {
    for seed in 0..60u64 {
        let dir = Dir::new(&format!("crash-{seed}"));
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut random = |below: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state % below
        };
        let store = dir.open();
        for n in 0..24 {
            put(&store, n);
            if random(4) == 0 {
                store.sync().unwrap();
            }
            if random(5) == 0 {
                store.delete(&[shard(random(n + 1), 1, 1).0]).unwrap();
            }
        }
        drop(store);
        for _ in 0..1 + random(4) {
            let name = ["index.log", "seg-0000", "seg-0001", "seg-0002"][random(4) as usize];
            let Ok(file) = OpenOptions::new().read(true).write(true).open(dir.0.join(name)) else {
                continue;
            };
            let len = file.metadata().unwrap().len();
            if len == 0 {
                continue;
            }
            let at = random(len);
            if random(2) == 0 {
                file.set_len(at).unwrap();
            } else {
                let mut byte = [0];
                file.read_exact_at(&mut byte, at).unwrap();
                file.write_all_at(&[byte[0] ^ (1 << random(8))], at).unwrap();
            }
        }
        let store = dir.open();
        for n in 0..24 {
            is_right(&store, n);
        }
        put(&store, 99);
        assert!(is_right(&store, 99), "seed {seed}");
        let (bad, _, _) = store.scrub(0, 32).unwrap();
        let (again, checked, _) = store.scrub(0, 32).unwrap();
        assert!(again.is_empty(), "seed {seed}: {bad:?}");
        assert_eq!(checked, store.stat().num_used);
    }
}
