# mounted_here FOLDER: sets $fs_type to what is mounted on top there, and $fs_options.
mounted_here() {
    fs_type='' fs_options=''
    [ -r "$PROC/self/mountinfo" ] || return
    while read -r _ _ _ _ point rest; do
        [ "$point" = "$1" ] || continue
        rest=${rest##* - }
        fs_type=${rest%% *} fs_options=${rest##* }
    done << END
$(cat "$PROC/self/mountinfo")
END
}

is_ours() {
    mounted_here "$real"
    [ "$fs_type" = hugetlbfs ] || return 1
    case ",$fs_options," in
    *",pagesize=$((page_kib / 1024))M,"*) return 0 ;;
    esac
    return 1
}

# mount_pages FOLDER: mounts hugetlbfs for $page_kib there, as large as the regions will be: so no
# engine can enlarge its region's file and take the machine's other free pages.
mount_pages() {
    case $page_kib in
    2048) options=$OPTIONS_2MI,size=$((pages_2048 * page_kib * 1024)) ;;
    *) options=$OPTIONS_1GI,size=$((pages_1048576 * page_kib * 1024)) ;;
    esac
    mkdir -p "$1" || { why="cannot make $1" && return 1; }
    real=$(cd -P "$1" && pwd -P) # mountinfo shows no symbolic links
    is_ours && return
    if [ -n "$fs_type" ]; then
        why="$1 has a mount of $fs_type already ($fs_options)" && return 1
    fi
    mount -t hugetlbfs -o "$options" "$SOURCE" "$1"
    is_ours && return
    why="mounting hugetlbfs at $1 failed" && return 1
}

# Mounts all that is taken where the agent would: the preferred backing in mem, a second one beside.
# Sets $mounted, and $backing and $page_kib to the preferred one.
mount_all() {
    first='' first_kib=0
    for name in $BACKINGS; do
        case " $taken " in
        *" $name "*) ;;
        *) continue ;;
        esac
        case $name in
        HugeTLB1Gi) page_kib=1048576 folder=mem-hugetlb1gi ;;
        HugeTLB2Mi) page_kib=2048 folder=mem-hugetlb2mi ;;
        *) page_kib=0 ;;
        esac
        [ -z "$first" ] && first=$name first_kib=$page_kib folder=mem
        [ "$page_kib" -eq 0 ] && continue
        if mount_pages "$STATE/$folder"; then
            [ "$first" = "$name" ] && mounted=true
        else
            mounted=false
        fi
    done
    backing=$first page_kib=$first_kib
}

# Renamed into place: a reader sees the old result or the new one, never half of one. Not synced to
# a disk: what it says is true of this boot only.
write_result() {
    [ -n "$why" ] && say "$why"
    if { printf '%s\n' "{" \
        "  \"version\": 1," \
        "  \"pool\": \"$POOL\"," \
        "  \"boot_id\": \"$boot_id\"," \
        "  \"backing\": ${backing:+\"}${backing:-null}${backing:+\"}," \
        "  \"page_bytes\": $((page_kib * 1024))," \
        "  \"complete\": $complete," \
        "  \"mounted\": $mounted," \
        "  \"nodes\": [$json_nodes]," \
        "  \"passed_over\": [$json_passed]," \
        "  \"why\": \"$why\"" \
        "}" > "$RESULT.tmp"; } 2> /dev/null && mv -f "$RESULT.tmp" "$RESULT"; then
        say "result in $RESULT (complete: $complete, mounted: $mounted)"
    else
        say "cannot write $RESULT"
    fi
}

# Gives an empty root a small tmpfs of its own, so that engines cannot fill the one below it. Without
# that the pool is prepared all the same.
mount_root() {
    for entry in "$ROOT"/* "$ROOT"/.[!.]*; do
        if [ -e "$entry" ] || [ -h "$entry" ]; then return; fi
    done
    mounted_here "$(cd -P "$ROOT" && pwd -P)"
    [ -n "$fs_type" ] && return
    mount -t tmpfs -o "$ROOT_OPTIONS" "$SOURCE" "$ROOT" || say "cannot mount a tmpfs at $ROOT"
}

make_folder() {
    [ -h "$ROOT" ] && say "$ROOT is a symbolic link: nothing done" && return 1
    mkdir -p "$ROOT" && mount_root
    [ -d "$ROOT" ] && { [ -d "$STATE" ] || mkdir -m "$FOLDER_MODE" "$STATE"; }
}

main() {
    line "$PROC/sys/kernel/random/boot_id" || { say 'this boot has no id: nothing done' && return; }
    boot_id=$value
    make_folder || { say "cannot make $STATE: nothing done" && return; }
    if agent_holds "$STATE"; then
        say 'the agent holds this pool since this boot: nothing to do' && return
    fi
    if ! kernel_is_new_enough; then
        why='this kernel is older than Linux 5.14, which populating needs'
    elif ! find_nodes; then
        why='no NUMA node has both CPUs and memory that may be pinned'
    elif ! lay_out; then
        why='regions are asked for per GPU, and no GPU is on the PCI bus'
    elif ! find_size; then
        why="$wanted_kib KiB are asked for, and the machine has $machine_kib"
    else
        add_deferred
        find_reserve
        choose_by_node
        complete=$all_complete why=$all_why
        mount_all
    fi
    write_result
}

# The trap ends this with 0. No exit here: scripts of several pools may stand in one file.
main
