import Foundation
import Testing

@testable import MLXInferClient

struct ChatRequestTests {
    @Test func onlyWhatWasSetIsSent() {
        let expected = """
            {"model":"m","messages":[{"role":"system","content":"Be brief."},{"role":"user","content":"Hi"}],"stream":true,\
            "stream_options":{"include_usage":true}}
            """
        #expect(ChatRequest([.system("Be brief."), .user("Hi")]).json(model: "m").description == expected)
    }

    @Test func everyOptionHasItsField() {
        var options = SamplingOptions(maxTokens: 9, temperature: 0.5, seed: 7, stop: ["x", "y"])
        (options.topP, options.topK, options.minP, options.user) = (0.9, 40, 0.1, "me")
        (options.presencePenalty, options.frequencyPenalty, options.repetitionPenalty) = (0.1, 0.2, 1.1)
        (options.logitBias, options.topLogprobs) = ([12: -100, 3: 1.5], 0)
        let expected: JSONValue = [
            "model": "m", "messages": [], "max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "seed": 7,
            "stop": ["x", "y"], "presence_penalty": 0.1, "frequency_penalty": 0.2, "repetition_penalty": 1.1, "user": "me",
            "logit_bias": ["3": 1.5, "12": -100.0], "logprobs": true, "top_logprobs": 0, "stream": true,
            "stream_options": ["include_usage": true],
        ]
        #expect(ChatRequest([], options: options).json(model: "m") == expected)
    }

    @Test func toolsAndFormats() throws {
        var request = ChatRequest([.tool("12:00", callID: "c1")])
        request.tools = [Tool(name: "time", description: "What time it is", parameters: ["type": "object", "properties": [:]])]
        request.toolChoice = .tool("time")
        request.responseFormat = .jsonSchema(name: "answer", schema: ["type": "string"])
        request.additionalFields = ["adapter": "mine", "stream": false]
        let json = request.json(model: "m")
        #expect(json["messages"]?[0] == ["role": "tool", "content": "12:00", "tool_call_id": "c1"])
        #expect(json["tools"]?[0]?["function"]?["name"] == "time" && json["tool_choice"]?["function"]?["name"] == "time")
        #expect(
            json["response_format"] == [
                "type": "json_schema", "json_schema": ["name": "answer", "schema": ["type": "string"], "strict": true],
            ])
        #expect(json["adapter"] == "mine" && json["stream"] == true)
        #expect([ToolChoice.auto, .none, .required].map(\.json) == ["auto", "none", "required"])
        #expect([ResponseFormat.text, .jsonObject].map { $0.json["type"] } == ["text", "json_object"])
    }

    @Test func picturesKeepTheirPlace() {
        let png = ContentPart.attachment(data: Data([0x89, 0x50, 0x4E, 0x47]), mimeType: "image/png")
        let small = ContentPart.attachment(data: Data([1]), mimeType: "image/jpeg", detail: .low)
        var message = Message.user([.text("Before"), png, .text("After"), small])
        let url: JSONValue = ["type": "image_url", "image_url": ["url": "data:image/png;base64,iVBORw=="]]
        let other: JSONValue = ["type": "image_url", "image_url": ["url": "data:image/jpeg;base64,AQ==", "detail": "low"]]
        let texts: [JSONValue] = [["type": "text", "text": "Before"], ["type": "text", "text": "After"]]
        #expect(message.json["content"] == .array([texts[0], url, texts[1], other]))
        #expect(message.content == "BeforeAfter" && message.hasAttachments)
        message.content = "New"
        #expect(message.parts == [png, small, .text("New")])
        #expect(Message.tool([png], callID: "x").json["content"] == .array([url]))
        #expect(Message.user([.text("A"), .text("B")]).json == Message.user("AB").json)
    }

    @Test func anAnswerOfAType() throws {
        struct Point: Decodable, Equatable {
            var x: Int
        }
        var answer = ChatResponse()
        (answer.text, answer.finishReason) = (#"{"x": 3, "y": 4}"#, .stop)
        #expect(try answer.decoded() == Point(x: 3))
        for (text, reason) in [("{}", "the value has no x"), ("{\"x\": \"\"}", "x is not of type Int"), ("Three.", "not valid JSON")] {
            answer.text = text
            let error = #expect(throws: MLXInferError.self) { try answer.decoded(as: Point.self) }
            #expect(error == .undecodableAnswer(text: text, reason: reason))
        }
        answer.finishReason = .length
        let error = #expect(throws: MLXInferError.self) { try answer.decoded(as: Point.self) }
        #expect(error == .undecodableAnswer(text: "Three.", reason: "the limit of tokens cut it off"))
    }
}
