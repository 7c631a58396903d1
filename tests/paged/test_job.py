"""Who leads whom in a group, by hand."""

from paged import Sequence, SequenceGroup
from paged.job import Job


def family(*leads):
    """A job of sequences 0, 1, ...; leads: (sequence, its lead, tokens)."""
    seqs = [Sequence(index, range(12)) for index in range(5)]
    job = Job(SequenceGroup("r", seqs), 0, 0)
    for index, lead, num_tokens in leads:
        job.follow(seqs[index], seqs[lead], num_tokens)
    return job, seqs


def leads_of(job):
    return {seq_id: (lead.seq.seq_id, lead.num_tokens) for seq_id, lead in job.leads.items()}


def test_the_first_that_was_led_leads_the_others():
    job, seqs = family((1, 0, 12), (2, 0, 12), (3, 0, 4))
    job.remove(seqs[0])
    assert leads_of(job) == {2: (1, 12), 3: (1, 4)}


def test_it_leads_only_in_what_it_shared_itself():
    job, seqs = family((1, 0, 4), (2, 0, 8))
    job.remove(seqs[0])
    assert leads_of(job) == {2: (1, 4)}


def test_it_follows_whom_its_lead_followed():
    for num_tokens, shared in ((8, 8), (12, 8), (4, 4)):
        job, seqs = family((1, 0, 8), (2, 1, num_tokens))
        job.remove(seqs[1])
        assert leads_of(job) == {2: (0, shared)}


def test_one_that_led_nobody_just_leaves():
    job, seqs = family((1, 0, 8))
    job.remove(seqs[1])
    assert job.leads == {} and seqs[1] not in job.seqs and len(job.seqs) == 4
