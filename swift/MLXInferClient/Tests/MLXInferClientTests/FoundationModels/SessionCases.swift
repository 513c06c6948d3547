#if canImport(FoundationModels, _version: 2)
    import Foundation
    import FoundationModels

    @testable import MLXInferClient

    /// Requests of sessions, by the names that the golden files use. The module's own `Transcript` is another one.
    @available(macOS 27, iOS 27, *)
    enum SessionCases {
        typealias History = FoundationModels.Transcript
        typealias Request = LanguageModelExecutorGenerationRequest

        static let weather = History.ToolDefinition(name: "weather", description: "The weather in a city", parameters: place)
        static let time = History.ToolDefinition(name: "time", description: "The time", parameters: schema("Nothing", []))
        static let place = schema("Place", [("city", "The city's name")])

        static func schema(_ name: String, _ properties: [(String, String)]) -> GenerationSchema {
            let found = properties.map { name, text in
                DynamicGenerationSchema.Property(name: name, description: text, schema: DynamicGenerationSchema(type: String.self))
            }
            return try! GenerationSchema(root: DynamicGenerationSchema(name: name, properties: found), dependencies: [])
        }

        /// A trip of days, which are of another type, and are declared in an order that is not that of the alphabet.
        static var trip: GenerationSchema {
            let day = DynamicGenerationSchema(
                name: "Day",
                properties: [
                    .init(name: "subtitle", schema: DynamicGenerationSchema(type: String.self)),
                    .init(name: "kind", schema: DynamicGenerationSchema(name: "Kind", anyOf: ["museum", "beach"])),
                    .init(name: "cost", schema: DynamicGenerationSchema(type: Double.self), isOptional: true),
                ])
            let days = DynamicGenerationSchema(arrayOf: DynamicGenerationSchema(referenceTo: "Day"), minimumElements: 0, maximumElements: 3)
            let root = DynamicGenerationSchema(
                name: "Trip",
                properties: [.init(name: "title", schema: DynamicGenerationSchema(type: String.self)), .init(name: "days", schema: days)])
            return try! GenerationSchema(root: root, dependencies: [day])
        }

        static func text(_ text: String) -> History.Segment { .text(.init(id: "t", content: text)) }

        static func prompt(_ texts: String...) -> History.Entry { .prompt(.init(id: "p", segments: texts.map(text))) }

        static func instructions(_ texts: String..., tools: [History.ToolDefinition] = []) -> History.Entry {
            .instructions(.init(id: "i", segments: texts.map(text), toolDefinitions: tools))
        }

        static func response(_ texts: String...) -> History.Entry { .response(.init(id: "r", segments: texts.map(text))) }

        static func call(_ id: String, _ name: String, _ json: String) -> History.ToolCall {
            .init(id: id, toolName: name, arguments: try! GeneratedContent(json: json))
        }

        static func output(_ id: String, _ name: String, _ segments: History.Segment...) -> History.Entry {
            .toolOutput(.init(id: id, toolName: name, segments: segments))
        }

        static func picture() -> History.Segment {
            .attachment(.init(id: "a", content: .image(.init(imageURL: pictureFile()))))
        }

        static func pictureFile() -> URL {
            let file = FileManager.default.temporaryDirectory.appendingPathComponent("mlx-\(UUID().uuidString).png")
            try! Data(base64Encoded: Self.dot)!.write(to: file)
            return file
        }

        /// A PNG file of one pixel.
        private static let dot =
            "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="

        static func request(
            _ entries: History.Entry..., tools: [History.ToolDefinition] = [], schema: GenerationSchema? = nil,
            options: GenerationOptions = GenerationOptions(), context: ContextOptions = ContextOptions()
        ) -> Request {
            Request(
                id: UUID(), transcript: History(entries: entries), enabledTools: tools, schema: schema, generationOptions: options,
                contextOptions: context, metadata: [:])
        }
    }

    @available(macOS 27, iOS 27, *)
    extension SessionCases {
        static let all: [String: [String: @Sendable () -> Request]] = [
            "text": texts, "tools": tools, "schemas": schemas, "options": options, "failures": failures,
        ]

        private static let texts: [String: @Sendable () -> Request] = [
            "aPrompt": { request(prompt("Hello")) },
            "instructions": { request(instructions("Be short."), prompt("Hello")) },
            "severalSegments": { request(instructions("Be short.", "Be kind."), prompt("One.", "Two.")) },
            "aConversation": {
                request(instructions("Be short."), prompt("France?"), response("Paris."), prompt("And Italy?"))
            },
            "reasoningIsNotReplayed": {
                let thought = History.Reasoning(id: "x", segments: [text("I think of 1.")])
                return request(prompt("Begin."), .reasoning(thought), response("1"), prompt("Go on."))
            },
            "structuredContent": {
                let content = GeneratedContent(properties: ["city": "Paris", "people": 2_100_000])
                let segment = History.Segment.structure(.init(id: "s", source: "City", content: content))
                return request(
                    .prompt(.init(id: "p", segments: [text("Look:"), segment])), .response(.init(id: "r", segments: [segment])),
                    prompt("Well?"))
            },
            "aPicture": { request(.prompt(.init(id: "p", segments: [text("See"), picture(), text("What"), text("is it?")]))) },
            "anEmptyAnswer": { request(prompt("Say nothing.")) },
            "cutOffText": { request(prompt("Tell a story."), options: GenerationOptions(maximumResponseTokens: 2)) },
        ]

        private static let tools: [String: @Sendable () -> Request] = [
            "noCall": { request(instructions("Help.", tools: [weather]), prompt("Well?"), tools: [weather]) },
            "aWholeCall": { request(prompt("Weather in Paris?"), tools: [weather]) },
            "aCallInPieces": { request(prompt("Weather in Paris?"), tools: [weather]) },
            "twoCalls": { request(prompt("Weather and time in Rome?"), tools: [weather, time]) },
            "textBeforeACall": { request(prompt("Weather in Oslo?"), tools: [weather]) },
            "resultsOfCalls": {
                let calls = History.ToolCalls(id: "c", [call("call_1", "weather", #"{"city":"Rome"}"#), call("call_2", "time", "{}")])
                let rain = GeneratedContent(properties: ["rain": true])
                let structure = History.Segment.structure(.init(id: "s", source: "Weather", content: rain))
                return request(
                    prompt("Rome?"), response("Let me look."), .toolCalls(calls), output("call_1", "weather", text("14 °C"), structure),
                    output("call_2", "time", text("12:00")), tools: [weather, time])
            },
            "aPictureAsResult": {
                let calls = History.ToolCalls(id: "c", [call("call_1", "screenshot", "{}")])
                return request(prompt("Look."), .toolCalls(calls), output("call_1", "screenshot", text("The screen:"), picture()))
            },
            "aCallIsRequired": {
                request(prompt("Go."), tools: [time], options: GenerationOptions(toolCallingMode: .required))
            },
            "callsAreForbidden": {
                request(prompt("Go."), tools: [time], options: GenerationOptions(toolCallingMode: .disallowed))
            },
        ]

        private static let schemas: [String: @Sendable () -> Request] = [
            "notInThePrompt": { request(prompt("A city?"), schema: place, context: ContextOptions(includeSchemaInPrompt: false)) },
            "inThePrompt": { request(prompt("A city?"), schema: place, context: ContextOptions(includeSchemaInPrompt: true)) },
            "nestedDefinitions": { request(prompt("A trip?"), schema: trip) },
            "withTools": { request(prompt("A city?"), tools: [weather], schema: place) },
            "ofAnEarlierPrompt": {
                let earlier = History.Prompt(
                    id: "p", segments: [text("A city?")], responseFormat: .init(schema: place),
                    contextOptions: ContextOptions(includeSchemaInPrompt: true))
                return request(
                    .prompt(earlier), response(#"{"city": "Rome"}"#), prompt("Another?"), schema: place,
                    context: ContextOptions(includeSchemaInPrompt: true))
            },
            "cutOffJSON": { request(prompt("A city?"), schema: place, options: GenerationOptions(maximumResponseTokens: 3)) },
        ]

        private static let options: [String: @Sendable () -> Request] = [
            "greedy": { request(prompt("Go."), options: GenerationOptions(samplingMode: .greedy, maximumResponseTokens: 9)) },
            "topK": {
                request(prompt("Go."), options: GenerationOptions(samplingMode: .random(top: 40, seed: 7), temperature: 3))
            },
            "nucleus": {
                let mode = GenerationOptions.SamplingMode.random(probabilityThreshold: 0.9, seed: .max)
                return request(prompt("Go."), options: GenerationOptions(samplingMode: mode, temperature: 0.5))
            },
            "deepReasoning": { request(prompt("Go."), context: ContextOptions(reasoningLevel: .deep)) },
            "noReasoning": { request(prompt("Go."), context: ContextOptions(reasoningLevel: .custom("none"))) },
        ]

        private static let failures: [String: @Sendable () -> Request] = [
            "tooLong": { request(prompt("Long.")) },
            "tooMany": { request(prompt("Go.")) },
            "tooSlow": { request(prompt("Go.")) },
            "noEyes": { request(.prompt(.init(id: "p", segments: [text("See"), picture()]))) },
            "aBrokenPicture": { request(.prompt(.init(id: "p", segments: [text("See"), picture()]))) },
            "aSchemaThatCannotBeEnforced": { request(prompt("A city?"), schema: place) },
            "aToolThatCannotBeEnforced": { request(prompt("Go."), tools: [time, weather]) },
            "noTools": { request(prompt("Go."), tools: [time]) },
            "noSuchModel": { request(prompt("Go.")) },
            "anErrorInTheStream": { request(prompt("Go.")) },
            "aFilter": { request(prompt("Go.")) },
            "aCutOffCall": { request(prompt("Weather in Paris?"), tools: [weather]) },
            "aLostConnection": { request(prompt("Go.")) },
            "aCustomSegment": { request(.prompt(.init(id: "p", segments: [.custom(Sound(id: "s", content: "beep"))]))) },
        ]
    }

    /// A segment of an app's own.
    @available(macOS 27, iOS 27, *)
    private struct Sound: FoundationModels.Transcript.CustomSegment {
        let id: String
        let content: String
        var description: String { content }
    }
#endif
