//! Tests of the segment store: what is put comes back, and nothing else ever does.

use super::*;
use crate::index_log;

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
    store.delete(&[shard(3, 1, 1).0], false).unwrap();
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
    assert!(on_disk <= 4 * 8 * 8192 + 64 * RECORD_BYTES as u64);
    store.delete(&[shard(5, 1, 1).0], false).unwrap();
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
fn a_damaged_record_costs_nothing_that_was_synced() {
    for record in [0, 4, 9] {
        let dir = Dir::new(&format!("damaged-{record}"));
        let store = dir.open();
        for n in 0..10 {
            put(&store, n);
        }
        store.sync().unwrap();
        drop(store);
        let log = OpenOptions::new().write(true).open(dir.0.join("index.log")).unwrap();
        log.write_all_at(&[0xff], record * RECORD_BYTES as u64 + 11).unwrap();
        let store = dir.open();
        assert!((0..10).all(|n| is_right(&store, n)), "record {record}");
        assert_eq!(store.recovery.num_shards, 10);
    }
}

#[test]
fn what_was_deleted_does_not_come_back_with_a_rebuilt_log() {
    let dir = Dir::new("deleted");
    let store = dir.open();
    for n in 0..10 {
        put(&store, n);
    }
    store.delete(&[shard(3, 1, 1).0], false).unwrap();
    store.delete(&[shard(8, 1, 1).0], true).unwrap();
    drop(store);
    let segment = std::fs::read(segment_path(&dir.0, 1)).unwrap();
    assert!(segment[..8192].iter().all(|byte| *byte == 0));
    std::fs::remove_file(dir.0.join("index.log")).unwrap();
    let store = dir.open();
    assert!((0..10).all(|n| is_right(&store, n) == (n != 3 && n != 8)));
    assert_eq!(store.rescan().unwrap(), 0);
}

#[test]
fn a_log_cut_short_is_made_good_by_a_rescan() {
    let dir = Dir::new("cut");
    let store = dir.open();
    for n in 0..10 {
        put(&store, n);
    }
    store.sync().unwrap();
    drop(store);
    let log = OpenOptions::new().write(true).open(dir.0.join("index.log")).unwrap();
    // Of the claims nothing is left either: they would tell where to look.
    log.set_len(RECORD_BYTES as u64).unwrap();
    let store = dir.open();
    assert!(!is_right(&store, 9));
    assert_eq!(store.rescan().unwrap(), 10 - store.recovery.num_shards);
    assert!((0..10).all(|n| is_right(&store, n)));
    // The slots that were taken up are not given away.
    for n in 20..30 {
        put(&store, n);
    }
    assert!((0..10).chain(20..30).all(|n| is_right(&store, n)));
    drop(store);
    assert!((0..10).chain(20..30).all(|n| is_right(&dir.open(), n)));
}

#[test]
fn two_group_commits_at_once_both_wait_for_the_disk() {
    let dir = Dir::new("sync");
    let store = dir.open();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let store = &store;
            scope.spawn(move || {
                for n in 0..6 {
                    let (_, header, data) = shard(thread * 6 + n, 1, 5_000);
                    let number = store.put(&[&header, &data]).unwrap();
                    assert!(store.sync().unwrap() > number);
                }
            });
        }
    });
    drop(store);
    let store = dir.open();
    assert_eq!(store.recovery.num_torn, 0);
    assert!((0..24).all(|n| is_right(&store, n)));
}

/// Which slots the file names by now, claimed or put.
fn logged(dir: &Dir) -> (Vec<u32>, Vec<u32>) {
    let (mut claimed, mut put) = (vec![], vec![]);
    for (_, record) in index_log::parse(&std::fs::read(dir.0.join("index.log")).unwrap()) {
        match record {
            Record::Claim(slots) => claimed.extend(slots),
            Record::Put(_, place) => put.push(place.slot),
            _ => {}
        }
    }
    (claimed, put)
}

#[test]
fn puts_that_no_record_names_yet_come_back_by_their_claims() {
    let dir = Dir::new("claims");
    let store = dir.open();
    for n in 0..5 {
        put(&store, n);
    }
    let (claimed, named) = logged(&dir);
    assert_eq!(
        (claimed.len(), named.len()),
        (8, 0),
        "one segment claimed, nothing written for puts"
    );
    drop(store);
    let store = dir.open();
    assert_eq!(store.recovery, Recovery { num_shards: 5, num_torn: 0, was_rebuilt: false });
    // The next segment's claim takes along what waits.
    for n in 5..9 {
        put(&store, n);
    }
    assert_eq!(logged(&dir).1.len(), 8);
    store.sync().unwrap();
    assert_eq!(logged(&dir).1.len(), 9);
    drop(store);
    let store = dir.open();
    assert_eq!(store.recovery, Recovery { num_shards: 9, num_torn: 0, was_rebuilt: false });
    assert!((0..9).all(|n| is_right(&store, n)));
}

#[test]
fn claims_outlive_a_compaction() {
    let dir = Dir::new("claims-compact");
    let store = dir.open();
    put(&store, 0);
    // One that is being written meanwhile.
    let (slot, file) = store.take_slot(&mut store.lock()).unwrap();
    store.lock().compact(&dir.0).unwrap();
    let (_, header, data) = shard(7, 1, 5_000);
    file.write_all_at(&[header, data].concat(), store.geometry.offset(slot)).unwrap();
    put(&store, 1);
    drop(store);
    let store = dir.open();
    assert!([0, 1, 7].iter().all(|n| is_right(&store, *n)));
    assert!(!store.recovery.was_rebuilt);
}

#[test]
fn a_slot_given_back_holds_no_second_copy() {
    let dir = Dir::new("given-back");
    let store = dir.open();
    let id = put(&store, 1);
    // As when two put the same shard at once: the later one finds the name taken.
    let (slot, file) = store.take_slot(&mut store.lock()).unwrap();
    let (_, header, data) = shard(1, 1, 5_000);
    file.write_all_at(&[header, data].concat(), store.geometry.offset(slot)).unwrap();
    store.lock().writing.clear();
    store.lock().give_back(slot);
    store.delete(&[id], false).unwrap();
    drop(store);
    let store = dir.open();
    assert!(!is_right(&store, 1));
    assert_eq!(store.stat().num_used, 0);
}

#[test]
fn a_log_on_a_full_disk_refuses_puts_and_forgets_nothing() {
    let dir = Dir::new("full");
    let store = dir.open();
    for n in 0..3 {
        put(&store, n);
    }
    let path = dir.0.join("index.log");
    let count = store.lock().log.num_records();
    let num_written = std::fs::metadata(&path).unwrap().len() / RECORD_BYTES as u64;
    let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
    let whole = store.lock().log.swap_file(full);
    // What is claimed can still be written; more cannot be claimed.
    for n in 3..8 {
        put(&store, n);
    }
    let (_, header, data) = shard(8, 1, 5_000);
    assert!(matches!(store.put(&[&header, &data]), Err(StoreError::Full)));
    assert_eq!(store.lock().log.num_records(), count + 5);
    // The header is blank: that is enough.
    assert_eq!(store.delete(&[shard(0, 1, 1).0], false).unwrap(), 1);
    assert_eq!(std::fs::metadata(&path).unwrap().len() / RECORD_BYTES as u64, num_written);
    // With room again all of it is written.
    store.lock().log.swap_file(whole);
    put(&store, 8);
    store.sync().unwrap();
    drop(store);
    let store = dir.open();
    assert_eq!(store.recovery, Recovery { num_shards: 8, num_torn: 0, was_rebuilt: false });
    assert!((0..9).all(|n| is_right(&store, n) == (n != 0)));
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
        store.delete(&[id], false).unwrap();
        assert!(store.stat().num_log_records <= LOG_SLACK + 8);
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
                store.delete(&[shard(random(n + 1), 1, 1).0], false).unwrap();
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
