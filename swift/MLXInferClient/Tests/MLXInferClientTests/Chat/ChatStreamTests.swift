import Testing

@testable import MLXInferClient

struct ChatStreamTests {
    private func outcome(_ events: [String], cut cuts: [Int] = []) -> Outcome<ChatEvent> {
        Outcome(StreamedAnswer(ChatStream()), Transcript.stream(events), cut: cuts)
    }

    @Test func everySplitGivesTheSame() {
        let expected = outcome(Transcript.chatEvents)
        #expect(expected.output == Transcript.chatMeaning)
        #expect(expected.failure == nil && expected.isComplete && expected.partial == "Grüße 🙂")
        for cuts in splits(of: Transcript.chat.count, random: 100) {
            #expect(outcome(Transcript.chatEvents, cut: cuts) == expected, "\(cuts)")
        }
    }

    @Test func whatIsCutOffIsNeverTakenForWhole() throws {
        let bytes = Transcript.chat
        let needed = bytes.count - "\r\n0\r\n\r\n".utf8.count
        for count in 0..<bytes.count {
            let cut = Outcome(StreamedAnswer(ChatStream()), Array(bytes.prefix(count)))
            #expect((cut.failure == nil) == (count >= needed), "\(count) bytes")
            #expect("Grüße 🙂".hasPrefix(cut.partial))
        }
    }

    @Test func reasoningUnderEachName() {
        let events = [
            Transcript.delta(#"{"reasoning_content":"a"}"#), Transcript.delta(#"{"reasoning":"b"}"#),
            Transcript.delta(#"{"reasoning_content":"c","reasoning":"c"}"#), Transcript.delta("{}", finish: #""length""#), Transcript.done,
        ]
        #expect(outcome(events).output.dropFirst() == [.reasoning("a"), .reasoning("b"), .reasoning("c"), .finished(.length)])
    }

    @Test func callsOfToolsArePutTogether() throws {
        let events = [
            Transcript.delta(#"{"tool_calls":[{"index":0,"id":"a","type":"function","function":{"name":"time","arguments":""}}]}"#),
            Transcript.delta(#"{"tool_calls":[{"index":1,"id":"b","function":{"name":"sum","arguments":"{\"x\""}}]}"#),
            Transcript.delta(#"{"tool_calls":[{"index":0,"function":{"arguments":"{}"}},{"index":1,"function":{"arguments":":1}"}}]}"#),
            Transcript.delta("{}", finish: #""tool_calls""#), Transcript.done,
        ]
        let result = outcome(events)
        var answer = ChatResponse()
        for event in result.output { answer.add(event) }
        #expect(
            answer.toolCalls == [ToolCall(id: "a", name: "time", arguments: "{}"), ToolCall(id: "b", name: "sum", arguments: #"{"x":1}"#)])
        #expect(answer.finishReason == .toolCalls)
        #expect(try answer.toolCalls[1].decodedArguments() == ["x": 1])
        #expect(throws: MLXInferError.self) { try answer.toolCalls[1].decodedArguments(as: [String].self) }
        #expect(answer.message.json["tool_calls"]?[1]?["function"]?["name"] == "sum")
    }

    @Test func logprobs() {
        let logprobs = """
            {"content":[{"token":"A","logprob":-0.5,"bytes":[65],"top_logprobs":[{"token":"A","logprob":-0.5,"bytes":[65]},\
            {"token":"B","logprob":-1}]}],"refusal":null}
            """
        let chunk = #"data: {"id":"1","model":"m","choices":[{"index":0,"delta":{"content":"A"},"logprobs":\#(logprobs)}]}"# + "\n\n"
        let chosen = TokenLogprob.Candidate(token: "A", logprob: -0.5, bytes: [65])
        let expected = TokenLogprob(chosen: chosen, top: [chosen, .init(token: "B", logprob: -1)])
        #expect(outcome([chunk, Transcript.delta("{}", finish: #""stop""#), Transcript.done]).output.contains(.logprobs([expected])))
    }

    @Test func whatIsNotKnownIsTolerated() {
        let events = [
            #"data: {"novel":{"deep":[1]},"choices":[{"delta":{"content":"a","audio":{"id":1}},"extra":0,"finish_reason":null}],"usage":null}"#
                + "\n\n",
            "event: ping\ndata: {}\n\n", "data: {\"choices\":null}\n\n",
            #"data: {"choices":[{"index":0,"delta":null,"finish_reason":"tired"}]}"# + "\n\n", Transcript.done,
        ]
        let result = outcome(events)
        #expect(result.output == [.started(id: "", model: ""), .text("a"), .finished(.other("tired"))])
        #expect(FinishReason.other("tired").rawValue == "tired" && Role(rawValue: "critic") == .other("critic"))
    }

    @Test func aStreamMayEndWithoutItsMarkButNotWithoutItsReason() {
        let whole = Array(Transcript.chatEvents.dropLast())
        #expect(outcome(whole).output == Transcript.chatMeaning && outcome(whole).failure == nil)
        #expect(outcome([Transcript.delta(#"{"content":"a"}"#)]).failure != nil)
        #expect(outcome([Transcript.delta(#"{"content":"a"}"#), Transcript.done]).failure != nil)
        #expect(outcome([]).failure != nil)
    }

    @Test func whatFollowsTheEndIsIgnored() {
        #expect(
            outcome(Transcript.chatEvents + [Transcript.delta(#"{"content":"more"}"#), "data: nonsense\n\n"]).output
                == Transcript.chatMeaning)
    }

    @Test(arguments: [
        "data: {\n\n", "data: nonsense\n\n", "data: []\n\n", "data: \n\n", "data: {\"choices\":5}\n\n",
        "data: {\"choices\":[{\"index\":1}]}\n\n",
    ])
    func garbage(_ event: String) {
        let first = Transcript.delta(#"{"content":"a"}"#)
        let count = Transcript.stream([first, event]).count
        for cuts in splits(of: count, random: 5) {
            let result = outcome([first, event], cut: cuts)
            #expect(result.output == [.started(id: "chatcmpl-1", model: "tiny"), .text("a")] && result.partial == "a")
            #expect(result.failure?.contains("malformed") == true)
        }
    }

    @Test(arguments: [
        (#"{"error":{"message":"no memory","type":"server_error","param":null,"code":"oom"}}"#, "server_error", "oom"),
        (#"{"error":{"message":"no memory","code":503}}"#, nil, "503"), (#"{"error":"no memory"}"#, nil, nil),
        (#"{"choices":[],"error":{"message":"no memory"}}"#, nil, nil),
    ])
    func anErrorInTheMiddle(_ body: String, _ type: String?, _ code: String?) throws {
        var reader = StreamedAnswer(ChatStream())
        var output: [ChatEvent] = []
        let bytes = Transcript.stream([Transcript.delta(#"{"content":"a"}"#), "data: \(body)\n\n"])
        let error = #expect(throws: MLXInferError.self) { try reader.feed(bytes[...], into: &output) }
        #expect(error == .api(APIError(status: 200, type: type, code: code, message: "no memory", requestID: "r1")))
        #expect(output.last == .text("a"))
    }
}
