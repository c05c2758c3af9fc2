"""Which tests of the suite run on which kind of service when nobody asks for more: `--full` and `--backend` do.

Four variants run the whole suite, at least one for each way in which a service reaches a sandbox: `local` from the
host, as root and not, `docker` by entering a container, `e2b` through programs that run inside. The others differ from
one of these in what is named here: SHORT is what crosses between service and sandbox, with a test of every part of the
contract at least; ISOLATION is what the sandbox's own kernel, user and limits decide.
`tests/unit/support/test_sandbox_variants.py` checks that each test has a variant, and that every variant runs some of
each file.
"""

from __future__ import annotations

from typing import Final

SHORT: Final = frozenset(
    {
        # test_sandboxes.py
        "test_a_cancelled_creation_leaves_nothing",
        "test_a_lease_that_nobody_renews_ends_the_sandbox",
        "test_a_repeated_request_gives_the_same_sandbox_and_another_spec_is_refused",
        "test_a_sandbox_that_dies_is_lost_and_nobody_waits_for_it",
        "test_a_snapshot_can_stand_on_a_snapshot",
        "test_deleting_ends_its_processes_its_watchers_and_is_idempotent",
        "test_missing_capability_is_refused_before_any_work",
        "test_pausing_is_declared_and_refused_where_it_is_not_there",
        "test_setup_runs_once_and_only_its_files_are_shared_by_forks",
        # test_processes.py
        "test_a_cancelled_run_is_killed",
        "test_a_signal_goes_to_the_whole_group",
        "test_a_terminal_is_a_terminal_and_has_a_size",
        "test_a_timeout_kills_grandchildren_that_left_the_group_and_ignore_signals",
        "test_a_watcher_that_comes_back_gets_every_byte_from_its_offset",
        "test_death_by_signal_differs_from_an_exit_code",
        "test_input_is_resumed_at_its_offset_and_closed_only_by_an_end",
        "test_killing_a_process_kills_its_daemons_and_only_them",
        "test_run_shows_both_ends_of_an_output_over_its_limit",
        "test_secrets_are_in_the_environment_and_in_no_argv_and_no_answer",
        "test_stdout_and_stderr_come_apart_and_the_exit_code_is_the_programs",
        # test_files.py
        "test_a_file_of_any_size_comes_back_as_it_was_written",
        "test_a_planted_link_leads_no_write_astray",
        "test_a_small_layer_lands_in_a_directory_that_its_owner_locked",
        "test_a_tar_is_unpacked_over_what_is_there",
        "test_directories_are_made_listed_and_removed",
        "test_ranges_of_a_file_are_read_alone",
        "test_the_hosts_files_are_not_there",
        "test_tree_download_is_a_complete_tar",
        "test_written_files_belong_to_the_user_with_the_given_mode",
        # test_hostile_files.py
        "test_a_file_is_read_with_the_rights_of_the_sandboxs_user",
        "test_hard_links_of_an_archive_stay_in_its_tree",
        "test_irregular_files_are_refused_unopened",
        # test_bounded_reads.py
        "test_sandbox_deleted_during_a_read_is_reported_gone",
        # test_diffs.py
        "test_the_diff_is_what_the_sandbox_changed_and_nothing_else",
        # test_joining.py
        "test_a_fork_that_joins_a_sandbox_ends_its_programs_and_goes_with_it",
        # test_limits.py
        "test_a_lease_ends_with_the_sandboxs_life_and_the_answer_says_so",
        # test_network.py
        "test_a_policy_is_narrowed_at_once_and_never_widened",
        "test_a_sandbox_without_network_has_loopback_only",
        "test_megabytes_pass_the_endpoint_both_ways_and_half_closes_too",
        "test_only_the_endpoint_can_be_reached",
        "test_the_one_endpoint_leads_to_its_upstream",
        # test_pause.py
        "test_forks_of_a_live_sandbox_have_its_files_and_share_nothing_more",
        "test_processes_stand_still_while_paused_and_continue_afterwards",
        # test_repeatable.py
        "test_what_a_backend_calls_repeatable_is_equal_in_two_sandboxes",
        # test_toolboxes.py
        "test_a_toolboxs_programs_come_first_and_cannot_be_changed",
    }
)
"""What crosses between service and sandbox in each way that there is, and what a backend does by itself."""

ISOLATION: Final = frozenset(
    {
        "test_a_file_that_the_kernel_cannot_read_is_a_typed_error",
        "test_a_fork_bomb_stays_in_its_sandbox_and_can_be_killed",
        "test_a_process_that_kills_all_it_sees_kills_only_its_own",
        "test_a_process_whose_first_thread_has_ended_is_killed_with_the_rest",
        "test_absent_upstream_is_a_broken_connection",
        "test_agent_leaving_mid_read_resets_the_upstream",
        "test_another_account_is_refused_where_there_is_none",
        "test_every_port_of_loopback_but_the_endpoint_is_closed",
        "test_file_server_cannot_be_made_to_read_its_own_process",
        "test_home_and_working_directory_are_the_users",
        "test_memory_over_the_limit_is_an_oom_and_the_sandbox_lives",
        "test_neither_udp_nor_raw_nor_abstract_sockets_lead_out",
        "test_only_families_that_a_network_namespace_holds_have_sockets",
        "test_siblings_share_neither_ports_nor_names",
        "test_the_environment_is_the_sandboxs_own",
        "test_tmp_is_bounded_and_shared_by_nobody",
        "test_zombies_of_daemons_are_reaped",
    }
)
"""What the sandbox's own kernel, user and limits decide: for a variant that has them otherwise than `local` as root."""

OWN_FILE_SYSTEM: Final = frozenset(
    {
        "test_a_name_of_any_content_is_a_name",
        "test_a_tree_is_removed_however_deep_and_locked_it_is",
        "test_deletion_of_a_name_that_is_no_text_is_exact_or_refused",
        "test_reads_follow_links_on_the_way_and_changes_do_not",
        "test_undecodable_names_are_listed_once_each",
    }
)
"""What the kernel's way with names and links decides: for a variant with a kernel of its own."""

MANY: Final = ("test_fifty_sandboxes_at_once_all_work", "test_a_hundred_megabytes_go_in_and_come_out")
"""What costs as much as fifty other tests where each sandbox or each request has a price of its own."""
