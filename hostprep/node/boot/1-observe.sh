# ---- From here on the script is the same for every pool. --------------------------------------
#
# Hazards it is written around:
#   * It runs before kubelet. Whatever goes wrong, it exits 0: a node with less memory prepared is
#     worth more than a node that does not come up. Hence no `set -e` and no `set -u`, every error
#     is handled where it happens, and the trap below turns even a fatal error of the shell into 0.
#   * A write to nr_hugepages that asks for more than the node has succeeds and gives less: only
#     reading back tells.
#   * Such a write takes memory from everything else on the node: it is made only where the node
#     keeps the pool's reserve, and a 256th of its memory at the least.
#   * 1 GiB pages need aligned free runs, which an hour of uptime destroys: they are tried first.
#     If they come short they go back before anything else is tried, else they would be lost.
#   * Node 0 has a hole below 4 GiB and so fewer of them than the others: each node falls back to
#     smaller pages alone. Only regions that are interleaved over all nodes tie these together.
#   * Nodes without CPUs are the memory of GPUs or of CXL expanders: left alone.
#   * 2 MiB pages come out of ZONE_MOVABLE first, from where registering with CUDA would migrate
#     every one: not taken on a node that has one.

STATE=$ROOT/$POOL
RESULT=$STATE/boot.json
LEDGER=$STATE/boot.ledger
PROC=$HOSTPREP_SYSROOT/proc
NODES=$HOSTPREP_SYSROOT/sys/devices/system/node
POOLS=$HOSTPREP_SYSROOT/sys/kernel/mm/hugepages
PCI=$HOSTPREP_SYSROOT/sys/bus/pci/devices
NEWLINE='
'
umask 022

backing='' page_kib=0 complete=false mounted=false why=''
json_nodes='' json_passed='' stopped=''

# systemd ends a start that takes too long with SIGTERM: what is done by then is kept and told.
trap 'stopped=yes' TERM INT HUP
trap 'exit 0' EXIT

say() {
    printf 'hostprep boot: pool %s: %s\n' "$POOL" "$*" >&2
}

# line FILE: sets $value to the first line of a file, empty where there is none.
line() {
    value=''
    # By cat, since `read` asks for one byte at a time, and a node's cpulist answers such a read
    # with the end of the file (seen on Linux 6.18).
    [ -r "$1" ] && value=$(cat "$1" 2> /dev/null)
    value=${value%%"$NEWLINE"*}
    [ -n "$value" ]
}

# number FILE: sets $value to the number in a file, 0 where there is none.
number() {
    line "$1"
    # A fatal error of the shell is what arithmetic on anything else would be.
    case $value in
    '' | *[!0-9]*) value=0 && return 1 ;;
    esac
}

# memory NODE: sets $total_kib, and $free_kib to what is free or could be dropped for us.
memory() {
    total_kib=0 free_kib=0
    [ -r "$NODES/node$1/meminfo" ] || return 1
    while read -r _ _ key kib _; do
        case $kib in
        '' | *[!0-9]*) continue ;;
        esac
        case $key in
        MemTotal:) total_kib=$kib ;;
        MemFree: | 'Active(file):' | 'Inactive(file):') free_kib=$((free_kib + kib)) ;;
        SReclaimable:) free_kib=$((free_kib + kib / 2)) ;;
        esac
    done << END
$(cat "$NODES/node$1/meminfo")
END
    [ "$total_kib" -gt 0 ]
}

# zones NODE: sets $movable and $fixed to yes where the node has zones of that kind.
zones() {
    movable='' fixed=''
    [ -r "$PROC/buddyinfo" ] || { fixed=yes && return; }
    while read -r _ zone_node _ zone_name _; do
        [ "$zone_node" = "$1," ] || continue
        case $zone_name in
        Movable) movable=yes ;;
        *) fixed=yes ;;
        esac
    done << END
$(cat "$PROC/buddyinfo")
END
}

# Sets $nodes to those with CPUs and memory that may be pinned, in order of their numbers.
find_nodes() {
    nodes='' node_count=0 nodes_mib=0
    for folder in "$NODES"/node[0-9] "$NODES"/node[0-9][0-9] "$NODES"/node[0-9][0-9][0-9] \
        "$NODES"/node[0-9][0-9][0-9][0-9]; do
        node=${folder##*/node}
        line "$folder/cpulist" && memory "$node" || continue
        zones "$node"
        [ -n "$fixed" ] || continue
        nodes="$nodes $node" node_count=$((node_count + 1))
        nodes_mib=$((nodes_mib + total_kib / 1024))
        # Node numbers are digits only (the patterns above), so these names are safe to eval.
        eval "regions_$node=0 movable_$node=\$movable total_mib_$node=$((total_kib / 1024))" \
            "free_mib_$node=$((free_kib / 1024))"
    done
    [ "$node_count" -gt 0 ]
}

# Small virtual machines initialise memory on demand: until then it is in no node's own numbers,
# only in the machine's. It is free.
add_deferred() {
    [ "$node_count" -eq 1 ] && [ ! -d "$NODES/node1" ] || return
    node=${nodes# }
    [ $((machine_kib / 1024)) -gt "$nodes_mib" ] &&
        eval "free_mib_$node=\$((free_mib_$node + machine_kib / 1024 - nodes_mib))"
}

add_region() {
    region_count=$((region_count + 1))
    eval "regions_$1=\$((regions_$1 + 1))"
}

# Cuts the pool as the agent will: sets regions_NODE, $interleaved and $region_count.
lay_out() {
    region_count=0 interleaved=0
    case $LAYOUT in
    Single) region_count=1 interleaved=1 ;;
    PerNUMANode) for node in $nodes; do add_region "$node"; done ;;
    Count)
        while [ "$region_count" -lt "$COUNT" ]; do
            for node in $nodes; do
                [ "$region_count" -lt "$COUNT" ] && add_region "$node"
            done
        done
        ;;
    PerGPU) for folder in "$PCI"/*; do gpu_region "$folder"; done ;;
    esac
    [ "$region_count" -gt 0 ]
}

# gpu_region FOLDER: adds the region of that PCI device if it is a GPU of NVIDIA or AMD.
gpu_region() {
    line "$1/class"
    case $value in
    0x0300* | 0x0302* | 0x0380* | 0x1200*) ;;
    *) return ;;
    esac
    line "$1/vendor"
    case $value in
    0x10de | 0x1002) ;;
    *) return ;;
    esac
    [ -e "$1/physfn" ] && return # a virtual function: part of a GPU that is listed itself
    number "$1/numa_node" || value=-1
    case "$nodes " in
    *" $value "*) add_region "$value" ;;
    *)
        if [ "$value" = -1 ] && [ "$node_count" -eq 1 ]; then
            add_region "${nodes# }"
        else
            region_count=$((region_count + 1)) interleaved=$((interleaved + 1))
        fi
        ;;
    esac
}

# Sets $with_cpus_kib: what a share is reckoned of. Nodes without CPUs are memory of GPUs (GB200).
find_kib_with_cpus() {
    with_cpus_kib=$machine_kib
    for folder in "$NODES"/node[0-9] "$NODES"/node[0-9][0-9] "$NODES"/node[0-9][0-9][0-9] \
        "$NODES"/node[0-9][0-9][0-9][0-9]; do
        line "$folder/cpulist" && continue
        [ -d "$folder" ] && memory "${folder##*/node}" && with_cpus_kib=$((with_cpus_kib - total_kib))
    done
    [ "$with_cpus_kib" -gt 0 ]
}

# Sets $wanted_kib. 64 bits hold the product of a PiB in KiB and a million.
find_size() {
    machine_kib=0
    while read -r key kib _; do
        [ "$key" = MemTotal: ] && machine_kib=$kib && break
    done << END
$(cat "$PROC/meminfo")
END
    case $machine_kib in
    '' | *[!0-9]*) machine_kib=0 ;;
    esac
    wanted_kib=$SIZE_KIB
    [ "$REGION_KIB" -gt 0 ] && wanted_kib=$((REGION_KIB * region_count)) # sized for a model
    [ "$PERCENT_MILLIONTHS" -gt 0 ] && find_kib_with_cpus &&
        wanted_kib=$((with_cpus_kib * PERCENT_MILLIONTHS / 1000000))
    [ "$machine_kib" -gt 0 ] && [ "$wanted_kib" -le "$machine_kib" ]
}

# Sets $reserve_mib as the planner does: 4 % of the machine, from 512 MiB to 16 GiB, unless the pool
# says otherwise.
find_reserve() {
    reserve_mib=$RESERVE_MIB
    if [ -z "$reserve_mib" ]; then
        reserve_mib=$((machine_kib * 4 / 100 / 1024))
        [ "$reserve_mib" -lt 512 ] && reserve_mib=512
        [ "$reserve_mib" -gt 16384 ] && reserve_mib=16384
    fi
    [ "$reserve_mib" -gt "$nodes_mib" ] && reserve_mib=$nodes_mib
}

# Populating needs Linux 5.14: on an older one pages would be taken for nothing.
kernel_is_new_enough() {
    line "$PROC/sys/kernel/osrelease" || return 1
    major=${value%%.*} minor=${value#*.}
    minor=${minor%%[!0-9]*}
    case $major$minor in
    '' | *[!0-9]*) return 1 ;;
    esac
    [ "$major" -gt 5 ] || { [ "$major" -eq 5 ] && [ "${minor:-0}" -ge 14 ]; }
}

