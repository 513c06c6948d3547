import Testing

@testable import MLXInferClient

struct CompletionStreamTests {
    private static let events = [
        #"data: {"id":"cmpl-1","model":"tiny","choices":[{"index":0,"text":"On","logprobs":{"tokens":["On"," ce"],"#
            + #""token_logprobs":[null,-0.25],"top_logprobs":[null,{" ce":-0.25," b":-3,"a":-3}],"text_offset":[0,2]},"finish_reason":null}]}"#
            + "\n\n",
        #"data: {"id":"cmpl-1","model":"tiny","choices":[{"index":0,"text":"","finish_reason":"length"}]}"# + "\n\n",
        Transcript.usage, Transcript.done,
    ]

    @Test func everySplitGivesTheSame() {
        let bytes = Transcript.stream(Self.events)
        let top = [(" ce", -0.25), (" b", -3), ("a", -3)].map { TokenLogprob.Candidate(token: $0.0, logprob: $0.1) }
        let expected: [ChatEvent] = [
            .started(id: "cmpl-1", model: "tiny"), .text("On"), .logprobs([TokenLogprob(chosen: top[0], top: top)]), .finished(.length),
            .usage(Usage(promptTokens: 5, completionTokens: 2, cachedTokens: 3)),
        ]
        for cuts in splits(of: bytes.count) { #expect(Outcome(StreamedAnswer(CompletionStream()), bytes, cut: cuts).output == expected) }
    }

    @Test func aRequestHasItsFields() throws {
        var request = CompletionRequest("Once", options: SamplingOptions(maxTokens: 5))
        (request.echo, request.options.topLogprobs, request.additionalFields) = (true, 2, ["suffix": "x"])
        let expected = """
            {"model":"m","prompt":"Once","max_tokens":5,"logprobs":2,"echo":true,"suffix":"x","stream":true,\
            "stream_options":{"include_usage":true}}
            """
        #expect(request.json(model: "m").description == expected)
    }
}
